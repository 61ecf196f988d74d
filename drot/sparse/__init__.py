"""Packed 2:4 weights: linear layers, whole models and fused products."""
