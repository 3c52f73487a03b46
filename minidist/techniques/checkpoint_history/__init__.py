"""--keep, --from-step, --overwrite: which checkpoints of a directory count."""
