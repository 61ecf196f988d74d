"""Fine-tuning of pruned models: LoRA or all kept weights, always under the mask."""
