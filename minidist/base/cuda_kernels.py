"""Operations as single kernels in CUDA C, for CuPy's arrays, which it imports. cuda.py has those that the core calls.

On a GPU every array function is a kernel that reads its operands from memory and writes its result back, so an
operation of a dozen functions moves a dozen times the bytes that it needs. Each kernel here computes the same as the
array functions next to the call that takes it, which NumPy's arrays use.

The kernel that adds into rows exists for determinism: CuPy's version adds with atomics from many threads, in an order
that differs between runs. Here one thread adds the values of one element in index order, so equal calls give equal
bits.

Proved by: tests/cupy/test_kernels.py
"""

from functools import cache
from pathlib import Path
from typing import Any

import cupy

from minidist.base.cuda_products import sum_rows

Array = Any  # one of CuPy's


def gelu_with_derivative(x: Array) -> tuple[Array, Array]:
    """Return (gelu(x), gelu'(x)) in tanh form, both new arrays of x's shape and dtype."""
    return _gelu()(x)  # type: ignore[no-any-return]


def adam(
    data: Array, grad: Array, mean: Array, square: Array, beta1: float, beta2: float, alpha: float, eps: float
) -> None:
    """Update the averages of the gradient and of its square, and take alpha mean / (sqrt(square) + eps) from the data.

    In place, of 1-D arrays of one dtype. alpha and eps contain the corrections of the step (core/optim/adam.py).
    """
    _adam()(grad, beta1, beta2, alpha, eps, data, mean, square)


def scatter_add_rows(target: Array, rows: Array, values: Array) -> None:
    """target[rows[i]] += values[i] for each i, in index order: target (n, width), rows (m,), values (m, width)."""
    if not rows.size:
        return
    # The entries of one row lie together, in index order, because the sort is stable; edges: where each row's begin.
    rows = cupy.asarray(rows)
    order = cupy.argsort(rows, kind="stable")
    edges = cupy.searchsorted(rows[order], cupy.arange(target.shape[0] + 1))
    _scatter()(cupy.ascontiguousarray(values), order, edges, target.shape[1], target)


def scatter_add(target: Array, index: Any, values: Array) -> None:
    """target[index] += values in index order, repeats included; `target` must be C-contiguous."""
    assert target.flags.c_contiguous, "a reshaped copy would receive the sums"
    # Each element is a row of one number, at the position that the same index finds in an array of positions.
    positions = cupy.arange(target.size).reshape(target.shape)[index]
    scatter_add_rows(target.reshape(-1, 1), positions.reshape(-1), values.reshape(-1, 1))


def causal_exponentials(scores: Array) -> Array:
    """Turn scores (batch, heads, keys, queries) into exp(score - the query's largest), in place; return 1 / their sums.

    The last key is the last query's own, and a key after a query's own gets 0. Returns (batch, heads, queries, 1).
    """
    batch, heads, keys, queries = scores.shape
    inverse = cupy.empty((batch, heads, queries, 1), scores.dtype)
    grid = (batch * heads, -(-queries // 32))
    _function("causal_exponentials", scores)(grid, (32, 8), (scores, inverse, keys, queries))
    return inverse


def score_gradients(gradients: Array, delta: Array, exponentials: Array) -> None:
    """gradients = (gradients - delta) * exponentials, in place; delta has one row for all keys."""
    _score_gradients()(delta, exponentials, gradients)


def output_gradients(g: Array, o: Array, inverse: Array) -> tuple[Array, Array]:
    """Return d = g * inverse (batch, heads, queries, size), and the sums of d * o over the size, which stays with 1."""
    g, o = (array if array.strides[-1] == array.itemsize else cupy.ascontiguousarray(array) for array in (g, o))
    batch, heads, queries, size = g.shape
    d, delta = cupy.empty(g.shape, g.dtype), cupy.empty((batch, heads, queries, 1), g.dtype)
    strides = [stride // array.itemsize for array in (g, o) for stride in array.strides[:3]]
    rows = batch * heads * queries
    arguments = (g, o, inverse, d, delta, heads, queries, rows, size, *strides)
    _function("output_gradients", g)((-(-rows // 8),), (32, 8), arguments)
    return d, delta


def softmax_loss(scores: Array, targets: Array, counted: Array | None, part: float) -> tuple[Array, Array]:
    """Return the sum over rows of log(sum of exp(scores)) - the target's score, and part times its gradient.

    scores and the gradient (rows, classes), targets (rows,). counted: which rows count, None for all.
    """
    # The targets may lie in the host's memory.
    scores, targets = cupy.ascontiguousarray(scores), cupy.asarray(targets, cupy.int64)
    rows = 0 if counted is None else cupy.asarray(counted)
    losses, gradient = cupy.empty(len(scores), scores.dtype), cupy.empty_like(scores)
    arguments = (scores, targets, rows, scores.dtype.type(part), gradient, losses, scores.shape[1])
    _function("softmax_loss", scores)((len(scores),), (256,), arguments)
    return sum_rows(losses.reshape(-1, 1)).reshape(()), gradient


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Return normal * weight + bias, the normalised rows, and 1 / sqrt(variance + eps) of each row, (..., 1)."""
    x, weight, bias = (cupy.ascontiguousarray(array) for array in (x, weight, bias))
    n = x.shape[-1]
    y, normal, inverse = cupy.empty_like(x), cupy.empty_like(x), cupy.empty((*x.shape[:-1], 1), x.dtype)
    arguments = (x, weight, bias, y, normal, inverse, n, x.dtype.type(eps))
    _function("layer_norm", x)((x.size // n,), (128,), arguments)
    return y, normal, inverse


def layer_norm_gradient(g: Array, weight: Array, rows: Array, inverse: Array) -> Array:
    """Return (d - mean(d) - n mean(d n)) * inverse of each row n, with d = g * weight."""
    g, weight, rows = (cupy.ascontiguousarray(array) for array in (g, weight, rows))
    dx, n = cupy.empty_like(g), g.shape[-1]
    _function("layer_norm_gradient", g)((g.size // n,), (128,), (g, weight, rows, inverse, dx, n))
    return dx


# Compiled at the first call, for the GPU at hand and the dtype of the arrays (T).


@cache
def _gelu() -> Any:
    return cupy.ElementwiseKernel(
        "T x",
        "T value, T derivative",
        """
        const T c = 0.7978845608028654;  // sqrt(2 / pi)
        const T t = tanh(x * (c + (T)0.044715 * c * x * x));
        value = (T)0.5 * x * (1 + t);
        derivative = (T)0.5 * (1 + t + x * (1 - t * t) * (c + 3 * (T)0.044715 * c * x * x));
        """,
        "minidist_gelu_with_derivative",
    )


@cache
def _adam() -> Any:
    return cupy.ElementwiseKernel(
        "T grad, float64 beta1, float64 beta2, T alpha, T eps",
        "T data, T mean, T square",
        """
        // 1 - beta2 of a float32 beta2 would have three digits less.
        mean = (T)beta1 * mean + (T)(1 - beta1) * grad;
        square = (T)beta2 * square + (T)(1 - beta2) * grad * grad;
        data -= alpha * mean / (sqrt(square) + eps);
        """,
        "minidist_adam",
    )


@cache
def _scatter() -> Any:
    return cupy.ElementwiseKernel(
        "raw T values, raw int64 order, raw int64 edges, int64 width",
        "T target",
        """
        const long long row = i / width, column = i % width;
        for (long long k = edges[row]; k < edges[row + 1]; ++k)
            target += values[order[k] * width + column];
        """,
        "minidist_scatter_add_rows",
    )


@cache
def _score_gradients() -> Any:
    return cupy.ElementwiseKernel(
        "T delta, T exponential",
        "T gradient",
        "gradient = (gradient - delta) * exponential",
        "minidist_score_gradients",
    )


# The kernels whose threads work together; one template for float and double.
_CODE = Path(__file__).with_name("cuda_kernels.cu").read_text(encoding="utf-8")
_TEMPLATES = ("causal_exponentials", "layer_norm", "layer_norm_gradient", "output_gradients", "softmax_loss")


@cache
def _module() -> Any:
    names = [f"{name}<{kind}>" for name in _TEMPLATES for kind in ("float", "double")]
    return cupy.RawModule(code=_CODE, options=("-std=c++17",), name_expressions=names)


def _function(name: str, like: Array) -> Any:
    return _module().get_function(f"{name}<{'double' if like.dtype.itemsize == 8 else 'float'}>")
