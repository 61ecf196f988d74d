"""Pruned models side by side: with the dense original, over a grid of recipes; the page of a run; the demo."""
