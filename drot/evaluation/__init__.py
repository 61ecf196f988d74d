"""What a pruned model still knows: perplexity and zero-shot tasks."""
