"""Speed of 2:4 weights against dense weights, with and without rotations."""
