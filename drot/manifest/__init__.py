"""The manifest of a checkpoint, drot.json, its card, and the hashes of its files."""
