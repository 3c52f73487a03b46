"""Operations on tensors and their gradients. A file has those that belong together.

elementwise.py     operations on each element
matrix.py          matrix products
linear.py          product, bias and activation in one node
reductions.py      sums, means, maxima and softmaxes
shaping.py         reshape, transpose, join, cut, index
attention.py       causal self-attention
gelu.py            GELU
layer_norm.py      layer normalisation
rms_norm.py        RMS normalisation
embedding.py       table look-up
dropout.py         dropout
cross_entropy.py   the loss of a classifier or language model
"""
