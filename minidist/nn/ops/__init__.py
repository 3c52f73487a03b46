"""Operations in addition to those of the core, and what may watch or change the core's operations.

checkpoint.py      recomputation
batch_norm.py      batch normalisation
convolution.py     convolution over images
pooling.py         maximum pooling over images
grouped_attention.py     attention of separate heads, and of heads that share keys and values
rotary.py          rotary position embedding
swiglu.py          the gate of a SwiGLU layer
tensor_methods.py  methods of a tensor that the core does not have
function.py        operations that a user defines
functions.py       functions of each element, and maxima
shaping.py         transpose, stretch, join, stack and split
rms_norm.py        RMS normalisation
dropout.py         dropout of elements, and of the weights of attention
losses.py          the squared error
refusals.py        what operations, losses and parameters refuse
comparisons.py     operations that choose between two elements
composite.py       the fused operations from elementary ones
precision.py       autocast, and operands in half precision
in_place.py        writes into the arrays that a node keeps
objects.py         tensors in objects of a user's class
finite_differences.py    gradients compared with finite differences
"""
