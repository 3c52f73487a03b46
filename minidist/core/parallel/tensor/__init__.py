"""Tensor parallelism: every matrix is sharded over the ranks, and so is the vocabulary."""
