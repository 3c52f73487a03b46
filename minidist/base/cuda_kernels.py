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
_CODE = r"""
// The sum of `value` over the threads of a block, in the same order in every run.
template <typename T> __device__ T block_sum(T value) {
    __shared__ T of_warp[32];
    for (int offset = 16; offset; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
    __syncthreads();  // every thread has read the sum before this one
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    T total = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total += of_warp[warp];
    return total;
}

// The largest `value` of the threads of a block.
template <typename T> __device__ T block_max(T value) {
    __shared__ T of_warp[32];
    for (int offset = 16; offset; offset /= 2) value = max(value, __shfl_down_sync(0xffffffff, value, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    T largest = of_warp[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) largest = max(largest, of_warp[warp]);
    return largest;
}

// One block per row of classes.
template <typename T> __global__ void softmax_loss(
    const T* scores, const long long* targets, const bool* counted, T part, T* gradient, T* losses, long long classes
) {
    const long long row = blockIdx.x, target = targets[row];
    scores += row * classes;
    gradient += row * classes;
    T largest = scores[0], sum = 0;
    for (long long i = threadIdx.x; i < classes; i += blockDim.x) largest = max(largest, scores[i]);
    largest = block_max(largest);
    for (long long i = threadIdx.x; i < classes; i += blockDim.x) sum += exp(scores[i] - largest);
    sum = block_sum(sum);
    const T counts = counted && !counted[row] ? 0 : 1, factor = counts * part / sum;
    for (long long i = threadIdx.x; i < classes; i += blockDim.x)
        gradient[i] = exp(scores[i] - largest) * factor - (i == target ? counts * part : 0);
    if (threadIdx.x == 0) losses[row] = counts * (log(sum) - (scores[target] - largest));
}

// A warp per query: the row of g is multiplied by the query's number, and its product with the row of o is summed.
template <typename T> __global__ void output_gradients(
    const T* g, const T* o, const T* inverse, T* d, T* delta,
    long long heads, long long queries, long long rows, long long size,
    long long g0, long long g1, long long g2, long long o0, long long o1, long long o2
) {
    const long long row = 8LL * blockIdx.x + threadIdx.y;
    if (row >= rows) return;
    const long long sample = row / (heads * queries), head = row / queries % heads, query = row % queries;
    g += sample * g0 + head * g1 + query * g2;
    o += sample * o0 + head * o1 + query * o2;
    T sum = 0;
    for (long long i = threadIdx.x; i < size; i += 32) {
        const T value = g[i] * inverse[row];
        d[row * size + i] = value;
        sum += value * o[i];
    }
    for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
    if (threadIdx.x == 0) delta[row] = sum;
}

// Block (head, 32 queries): 8 threads per query pass over the keys, and neighbours read neighbouring queries.
template <typename T> __global__ void causal_exponentials(T* scores, T* inverse, long long keys, long long queries) {
    __shared__ T part[8][33];
    const long long query = 32 * blockIdx.y + threadIdx.x;
    const long long seen = query < queries ? keys - queries + query + 1 : 0;
    T* column = scores + blockIdx.x * keys * queries + query;

    // [1] The largest score of the query: each thread's own, then that of the 8.
    T largest = seen ? column[0] : 0;
    for (long long key = threadIdx.y; key < seen; key += 8) largest = max(largest, column[key * queries]);
    part[threadIdx.y][threadIdx.x] = largest;
    __syncthreads();
    for (int i = 0; i < 8; ++i) largest = max(largest, part[i][threadIdx.x]);
    __syncthreads();

    // [2] The exponentials, 0 for keys that the query does not see, and their sum.
    T total = 0;
    for (long long key = threadIdx.y; query < queries && key < keys; key += 8) {
        const T value = key < seen ? exp(column[key * queries] - largest) : 0;
        column[key * queries] = value;
        total += value;
    }
    part[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y == 0 && query < queries) {
        for (int i = 1; i < 8; ++i) total += part[i][threadIdx.x];
        inverse[blockIdx.x * queries + query] = 1 / total;
    }
}

// One block per row of n elements.
template <typename T> __global__ void layer_norm(
    const T* x, const T* weight, const T* bias, T* y, T* normal, T* inverse, long long n, T eps
) {
    const long long row = blockIdx.x * n;
    T sum = 0, squares = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += x[row + i];
    const T mean = block_sum(sum) / n;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) squares += (x[row + i] - mean) * (x[row + i] - mean);
    const T factor = 1 / sqrt(block_sum(squares) / n + eps);
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        const T value = (x[row + i] - mean) * factor;
        normal[row + i] = value;
        y[row + i] = value * weight[i] + bias[i];
    }
    if (threadIdx.x == 0) inverse[blockIdx.x] = factor;
}

template <typename T> __global__ void layer_norm_gradient(
    const T* g, const T* weight, const T* normal, const T* inverse, T* dx, long long n
) {
    const long long row = blockIdx.x * n;
    T sum = 0, along = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) {
        sum += g[row + i] * weight[i];
        along += g[row + i] * weight[i] * normal[row + i];
    }
    sum = block_sum(sum) / n;
    along = block_sum(along) / n;
    for (long long i = threadIdx.x; i < n; i += blockDim.x)
        dx[row + i] = (g[row + i] * weight[i] - sum - normal[row + i] * along) * inverse[blockIdx.x];
}
"""
_TEMPLATES = ("causal_exponentials", "layer_norm", "layer_norm_gradient", "output_gradients", "softmax_loss")


@cache
def _module() -> Any:
    names = [f"{name}<{kind}>" for name in _TEMPLATES for kind in ("float", "double")]
    return cupy.RawModule(code=_CODE, options=("-std=c++17",), name_expressions=names)


def _function(name: str, like: Array) -> Any:
    return _module().get_function(f"{name}<{'double' if like.dtype.itemsize == 8 else 'float'}>")
