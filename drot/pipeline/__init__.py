"""The run: layers are calibrated, rotated and pruned one after the other."""
