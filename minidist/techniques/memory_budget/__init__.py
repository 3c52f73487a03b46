"""--memory-budget, --memory-budget-file: what a rank may hold at a time decides what it computes in parts or twice."""
