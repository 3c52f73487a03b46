"""Oracles of data parallelism: one device, its contributions added in the declared order, and small models."""

import numpy as np

from minidist.core.autograd import Parameter, Tensor, contribution_recorder
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.nn import Linear
from minidist.core.nn.flat import FlatParameters
from minidist.core.nn.module import Module

WIDTH, ROWS = 6, 13  # 13 rows: shards of unequal size for 2, 3, 4, 5 and 8 ranks


class Block(Module):
    """Two linear layers, below the top level of the model."""

    def __init__(self, dtype):
        self.first = Linear(WIDTH, WIDTH, activation="relu", dtype=dtype, seed=None)
        self.second = Linear(WIDTH, WIDTH, bias=False, dtype=dtype, seed=None)

    def forward(self, x):
        return self.second(self.first(x))


class Nested(Module):
    """A separate parameter, a list of blocks, and one layer that is used twice (tied)."""

    def __init__(self, dtype=np.float32, seed=0):
        self.scale = Parameter(np.ones((1, WIDTH), dtype), init=("uniform", 1.0))
        self.tied = Linear(WIDTH, WIDTH, activation="relu", dtype=dtype, seed=None)
        self.blocks = [Block(dtype), Block(dtype)]
        self.initialize(seed)

    def forward(self, x):
        x = self.tied(x)
        for block in self.blocks:
            x = block(x)
        return self.tied(x) * self.scale


def batch(number=0, rows=ROWS, dtype=np.float32):
    """(inputs, gradient of the loss with respect to the outputs), any values."""
    rng = np.random.default_rng(number)
    return rng.standard_normal((rows, WIDTH)).astype(dtype), rng.standard_normal((rows, WIDTH)).astype(dtype)


def integers(number=0, rows=ROWS):
    """The same, with small integers in float64: every sum of products is exact, in any order."""
    rng = np.random.default_rng(number)
    return tuple(rng.integers(-3, 4, (rows, WIDTH)).astype(np.float64) for _ in range(2))


def with_integer_weights(model):
    """Replace the initial values by small integers."""
    rng = np.random.default_rng(1)
    for parameter in model.parameters():
        parameter.data[...] = rng.integers(-2, 3, parameter.shape)
        parameter.updated()
    return model


def shard(arrays, rank, ranks):
    """A rank's rows: consecutive, the first ranks get one more."""
    start = offsets(chunk_sizes(len(arrays[0]), ranks))
    return [array[start[rank] : start[rank + 1]] for array in arrays]


def run(model, arrays, scale=1.0):
    """Forward and backward of sum(outputs * weights) * scale."""
    inputs, weights = arrays
    model(Tensor(inputs)).backward(weights * weights.dtype.type(scale))


def gradient_of(model, arrays, scale=1.0):
    """The flat gradient of one backward on one device."""
    flat = FlatParameters(model.parameters())
    run(model, arrays, scale)
    return flat.grad.copy()


def contributions(model, arrays):
    """Each parameter's contributions, one for each use, in backward order; nothing is added."""
    caught = {}
    token = contribution_recorder.set(lambda parameter, array: caught.setdefault(parameter.name, []).append(array))
    try:
        run(model, arrays)
    finally:
        contribution_recorder.reset(token)
    return caught


def fold(arrays):
    """((a + b) + c) + ..."""
    total = None
    for array in arrays:
        total = array.copy() if total is None else total + array
    return total


def ordered_gradient(make_model, replicas, synchronize_each=False):
    """replicas[r][k]: arrays of micro-batch k of replica r. Added in the order that data parallelism declares, flat."""
    model = make_model()
    names = [parameter.name for parameter in model.parameters()]
    caught = [[contributions(model, arrays) for arrays in replica] for replica in replicas]

    def total(name):
        if synchronize_each:
            steps = range(len(caught[0]))
            return fold(fold(fold(replica[k][name]) for replica in caught) for k in steps)
        return fold(fold(site for micro in replica for site in micro[name]) for replica in caught)

    return np.concatenate([total(name).reshape(-1) for name in names])
