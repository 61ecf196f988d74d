"""What every room uses: errors, events, files, locks. It knows nothing of models."""
