"""A model's decoder layers: where their weights lie, and rotations that do not change its outputs."""
