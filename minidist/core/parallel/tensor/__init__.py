"""Tensor parallelism: every matrix is sharded over the ranks. `regions` has the borders, `layers` the two splits."""
