"""Packed 2:4 weights: their place in a model and in a checkpoint."""
