"""--batch-norm: over which rows a CNN normalises."""
