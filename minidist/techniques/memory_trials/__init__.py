"""--memory-budget, --recompute-budget: trials before the job find what fits the memory of its ranks."""
