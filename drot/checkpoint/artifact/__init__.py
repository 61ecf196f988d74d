"""Artifacts: what turns a public dense model into a checkpoint of drot, without the dense model's weights."""
