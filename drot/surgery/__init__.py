"""Changes to a model's weights and modules that do not change its outputs."""
