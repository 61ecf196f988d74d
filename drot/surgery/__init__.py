"""Changes of a model's weights and modules that leave its function as it was."""
