"""Calibration: text, the hidden states that it makes, and the Hessians of the linears' inputs."""
