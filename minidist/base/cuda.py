"""The whole operations of CuPy's arrays, in one module: `arrays.kernels_of(array)` returns it. meta_kernels.py has the
same names for arrays without data.

Proved by: tests/cupy/test_kernels.py
"""

# ruff: noqa: F401

from minidist.base.cuda_attention import attention, attention_gradients
from minidist.base.cuda_kernels import (
    adam,
    gelu_with_derivative,
    layer_norm,
    layer_norm_gradient,
    scatter_add,
    scatter_add_rows,
    softmax_loss,
)
from minidist.base.cuda_products import product, sum_rows
