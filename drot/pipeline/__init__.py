"""A run of `drot.prune`, which calibrates, rotates and prunes one layer after the other."""
