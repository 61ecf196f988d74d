"""Packed 2:4 weights: linear layers, whole models, fused products, and their entry in config.json."""
