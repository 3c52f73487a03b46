"""Operations on tensors and their gradients. Related operations share a file.

elementwise.py     operations on each element, and GELU
linear.py          matrix products, the look-up of rows, and a linear layer as one node
reductions.py      sums, means and the softmax
shaping.py         reshape, index
attention.py       causal self-attention
layer_norm.py      layer normalisation
cross_entropy.py   the loss of a classifier or language model
"""
