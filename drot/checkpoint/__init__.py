"""Checkpoints: Hugging Face folders with a manifest, rotation files, and the state of unfinished runs."""
