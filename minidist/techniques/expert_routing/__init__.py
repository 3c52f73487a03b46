"""--top-k, --capacity-factor, --aux-loss-weight: which experts a token gets."""
