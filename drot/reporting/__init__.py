"""A page with the figures of one run, or of several runs side by side, made from their manifests."""
