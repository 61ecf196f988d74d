"""Speed: dense against 2:4, with and without rotations."""
