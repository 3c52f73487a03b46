"""--memory-budget-file: micro-batches get larger or smaller when the memory that a rank may use changes."""
