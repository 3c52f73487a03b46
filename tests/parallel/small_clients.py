"""Three strategies in thirty lines each, to prove the foundations: a ZeRO-3, a 1F1B pipeline, a pipeline with weight
stashing.

Each is a function of a communicator and returns what a single device must have too. They use the public parts only:
`FlatParameters.bind/release`, `backward`, lanes, send and receive.
"""

import numpy as np

from minidist.autograd import Tensor
from minidist.base.layout import chunk_sizes
from minidist.base.trace import purpose
from minidist.collectives import all_gather, reduce_scatter
from minidist.nn import Linear
from minidist.nn.flat import FlatParameters

WIDTH, ROWS, LAYERS, LEARNING_RATE = 5, 4, 3, np.float32(0.125)


def build_layers():
    """Three Linear+ReLU layers of width 5: 30 parameters each, which 3 ranks share evenly and 4 do not."""
    layers = [Linear(WIDTH, WIDTH, activation="relu", seed=None) for _ in range(LAYERS)]
    for i, layer in enumerate(layers):
        layer.initialize(seed=7, prefix=f"layers.{i}")
    return layers


def micro_batch(number):
    """Inputs of micro-batch `number`, float32, any values."""
    return np.random.default_rng(number).standard_normal((ROWS, WIDTH)).astype(np.float32)


def loss_gradient(outputs):
    """Gradient of sum(outputs ** 2) / 2: the outputs themselves."""
    return outputs.copy()


def contributions(numbers, weights=None):
    """Gradients of each layer for each micro-batch on one device: {(layer, number): flat gradient}, each computed
    whole.

    weights[number]: optional flat values of each layer for that micro-batch.
    """
    layers, result = build_layers(), {}
    flats = [FlatParameters(layer.parameters()) for layer in layers]
    for number in numbers:
        for i, flat in enumerate(flats):
            if weights is not None:
                flat.bind(weights[number][i].copy())
            flat.zero_grad()
        x = Tensor(micro_batch(number))
        for layer in layers:
            x = layer(x)
        x.backward(loss_gradient(x.data))
        for i, flat in enumerate(flats):
            result[i, number] = flat.grad.copy()
    return result


def in_order(parts):
    """Add arrays one after the other."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def zero3(comm, micro_batches=2):
    """Parameters live as shards; a layer is gathered for its forward and its backward, its gradient is scattered in a
    lane.

    Returns this rank's shard of the summed gradient of each layer, added over micro-batches after each reduction.
    """
    layers = build_layers()
    units = [FlatParameters(layer.parameters(), pad_to=comm.size) for layer in layers]
    counts = [chunk_sizes(unit.padded_numel, comm.size) for unit in units]
    mine = [slice(comm.rank * c[0], (comm.rank + 1) * c[0]) for c in counts]
    shards = [unit.release()[place].copy() for unit, place in zip(units, mine, strict=True)]
    sums = [None] * LAYERS

    def gathered(i):
        with purpose("parameter_gather"):
            units[i].bind(all_gather(comm, shards[i]), version=units[i].version)
        return units[i]

    for k in range(micro_batches):
        inputs, outputs, works = [], [], []
        x = micro_batch(comm.rank * micro_batches + k)
        for i, layer in enumerate(layers):
            gathered(i)
            inputs.append(Tensor(x, requires_grad=True))
            outputs.append(layer(inputs[i]))
            x = outputs[i].data
            units[i].release()
        gradient = loss_gradient(x)
        for i in reversed(range(LAYERS)):
            gathered(i).zero_grad()
            outputs[i].backward(gradient, after_node=comm.progress)
            gradient = inputs[i].grad
            with purpose("gradient_reduce"):
                works.append(reduce_scatter(comm, units[i].grad, algorithm="ordered", async_op=True))
            units[i].release()
        for i, work in zip(reversed(range(LAYERS)), works, strict=True):
            shard = work.wait()
            sums[i] = shard if sums[i] is None else sums[i] + shard
    return sums


def one_f_one_b(comm, micro_batches=5, forward_seconds=0.0, backward_seconds=0.0):
    """1F1B on `comm.size` stages of one layer each; returns the stage's gradient, added in the order of its backwards."""
    p, s, m = comm.size, comm.rank, micro_batches
    layer = build_layers()[s]
    flat = FlatParameters(layer.parameters())
    alive, sends = {}, []

    def forward(i):
        x = (
            micro_batch(i) if s == 0 else np.empty((ROWS, WIDTH), np.float32)
        )  # a fresh buffer: it is saved for backward
        if s > 0:
            comm.recv(x, s - 1, tag=i)
        alive[i] = (x := Tensor(x, requires_grad=True)), layer(x)
        comm.compute(seconds=forward_seconds, name=f"F{i}")
        if s < p - 1:
            sends.append(comm.isend(alive[i][1].data, s + 1, tag=i))

    def backward(i):
        x, y = alive.pop(i)
        gradient = loss_gradient(y.data) if s == p - 1 else np.empty((ROWS, WIDTH), np.float32)
        if s < p - 1:
            comm.recv(gradient, s + 1, tag=m + i)
        y.backward(gradient)
        comm.compute(seconds=backward_seconds, name=f"B{i}")
        if s > 0:
            sends.append(comm.isend(x.grad, s - 1, tag=m + i))

    warm_up = min(m, p - 1 - s)
    for i in range(warm_up):
        forward(i)
    for i in range(m - warm_up):
        forward(warm_up + i)
        backward(i)
    for i in range(m - warm_up, m):
        backward(i)
    comm.waitall(sends)
    return flat.grad.copy()


def weight_stashing(comm, micro_batches=6):
    """PipeDream: an update after every backward, and a micro-batch's backward with the weights that its forward saw.

    Returns the stage's weights after each update, and the version that each micro-batch used.
    """
    p, s, m = comm.size, comm.rank, micro_batches
    layer = build_layers()[s]
    flat = FlatParameters(layer.parameters())
    latest, version = flat.data.copy(), 0
    alive, stash, used, history, sends = {}, {}, [], [latest], []

    def forward(i):
        x = micro_batch(i) if s == 0 else np.empty((ROWS, WIDTH), np.float32)
        if s > 0:
            comm.recv(x, s - 1, tag=i)
        stash[i] = latest, version
        used.append(version)
        flat.bind(latest, version)
        alive[i] = (x := Tensor(x, requires_grad=True)), layer(x)
        if s < p - 1:
            sends.append(comm.isend(alive[i][1].data, s + 1, tag=i))

    def backward(i):
        nonlocal latest, version
        x, y = alive.pop(i)
        gradient = loss_gradient(y.data) if s == p - 1 else np.empty((ROWS, WIDTH), np.float32)
        if s < p - 1:
            comm.recv(gradient, s + 1, tag=m + i)
        flat.bind(*stash.pop(i))
        flat.zero_grad()
        y.backward(gradient)
        if s > 0:
            sends.append(comm.isend(x.grad, s - 1, tag=m + i))
        latest, version = latest - LEARNING_RATE * flat.grad, version + 1  # out of place: the older one is still needed
        history.append(latest)

    warm_up = min(m, p - 1 - s)
    for i in range(warm_up):
        forward(i)
    for i in range(m - warm_up):
        forward(warm_up + i)
        backward(i)
    for i in range(m - warm_up, m):
        backward(i)
    comm.waitall(sends)
    return history, used
