"""Evaluation of a model: perplexity and zero-shot accuracy."""
