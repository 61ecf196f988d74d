"""Pruned models next to the dense one and to others: comparison, grid of recipes, page of a run, demo."""
