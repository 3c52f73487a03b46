"""--check-data: every sample is read exactly once per epoch by all ranks together."""
