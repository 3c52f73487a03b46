"""Tensor parallelism: every matrix is sharded over the ranks."""
