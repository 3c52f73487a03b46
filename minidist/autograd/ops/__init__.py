"""Operations on tensors and their gradients. A file has those that belong together.

elementwise.py     operations on each element
matrix.py          matrix products
linear.py          product, bias and activation in one node
reductions.py      sums, means, maxima and softmaxes
shaping.py         reshape, transpose, join, cut, index
comparisons.py     operations that choose between two elements
dry_attention.py   what attention keeps in a dry run
attention.py       causal self-attention
composite.py       the fused operations from elementary ones
rotary.py          rotary position embedding
gelu.py            GELU
swiglu.py          the gate of a SwiGLU layer
layer_norm.py      layer normalisation
rms_norm.py        RMS normalisation
batch_norm.py      batch normalisation
convolution.py     convolution over images
pooling.py         maximum pooling over images
embedding.py       table look-up
dropout.py         dropout
cross_entropy.py   the loss of a classifier or language model
checkpoint.py      recomputation
"""
