"""Several runs on one model, compared: a grid of recipes, and the demo on the embedded model."""
