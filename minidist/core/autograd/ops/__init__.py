"""Operations on tensors and their gradients. Related operations share a file.

linear.py          matrix products, the look-up of rows, a linear layer as one node, and GELU
attention.py       causal self-attention
layer_norm.py      layer normalisation
cross_entropy.py   the softmax, and the loss of a classifier or language model
"""
