"""Evaluation of models: perplexity, agreement with the dense original, accuracy in tasks, speed."""
