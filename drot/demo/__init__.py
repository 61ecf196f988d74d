"""`drot demo` and the model and texts that it needs."""
