"""Tensor parallelism: every matrix is sharded over the ranks. `regions` has the borders, `layers` the two splits.

layers.py              the two ways to split a product
regions.py             the borders of a region of split matrices
vocabulary.py          embedding and loss with the vocabulary split
sharding.py            a parameter's shard, and what a style is given
"""
