"""Tensor parallelism: every matrix is sharded over the ranks.

layers.py              a parameter's shard, the two ways to split a product, and the borders of what is split
vocabulary.py          embedding and loss with the vocabulary split
"""
