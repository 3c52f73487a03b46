"""--recompute: activations are computed again in backward, and not kept."""
