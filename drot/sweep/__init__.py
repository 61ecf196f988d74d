"""A grid of recipes, run on one model and compared."""
