"""Checkpoints: ordinary Hugging Face folders with a manifest, and the state of unfinished runs."""
