"""The library in 200 lines: ZeRO 3, a 1F1B pipeline and PipeDream's weight stashing, written with public parts only.

    python mpi_examples/library_in_200_lines.py --ranks 3
    mpiexec -n 3 python mpi_examples/library_in_200_lines.py

Start reading here: the rest of minidist builds on the same four parts.

    Tensor, Linear, backward    compute an output and its gradients on one rank (core/autograd/, core/nn/)
    FlatParameters              one array for the parameters of a unit (here a layer) and one for their gradients;
                                `bind` makes the parameters views of an array, `release` lets go of it (core/nn/flat.py)
    comm                        send, recv, isend: messages between ranks, simulated or by MPI (core/comm/)
    all_gather, reduce_scatter  what all ranks do together: the call waits for it, or it runs in a stream next to the
                                program (core/collectives/)

Each program is a function of a communicator, and its result equals that of one device bit for bit.

Proved by: tests/test_mpi_examples.py
"""

import numpy as np

from minidist import (
    BackwardObserver,
    FlatParameters,
    Linear,
    Tensor,
    all_gather,
    chunk_sizes,
    launch,
    purpose,
    reduce_scatter,
)

WIDTH, ROWS, LAYERS, LEARNING_RATE = 5, 4, 3, np.float32(0.125)


# --- the model and its data -------------------------------------------------------------------------------------------


def build_layers(count=LAYERS):
    """Build linear layers with ReLU, of width 5. Each has 30 parameters, which 3 ranks share evenly and 4 do not."""
    layers = [Linear(WIDTH, WIDTH, activation="relu", seed=None) for _ in range(count)]
    for i, layer in enumerate(layers):
        layer.initialize(seed=7, prefix=f"layers.{i}")  # values depend on seed and name, so all ranks have the same
    return layers


def micro_batch(number):
    """Return the inputs of micro-batch `number`: random float32 numbers."""
    return np.random.default_rng(number).standard_normal((ROWS, WIDTH)).astype(np.float32)


def loss_gradient(outputs):
    """Return the gradient of the loss sum(outputs ** 2) / 2, which is the outputs themselves."""
    return outputs.copy()


class Progress(BackwardObserver):
    """Lets messages travel while backward computes."""

    def __init__(self, comm):
        self.comm = comm

    def node_done(self):
        self.comm.progress()


# --- one device: what each program must equal -------------------------------------------------------------------------


def contributions(numbers, weights=None, layers=LAYERS):
    """Return the gradient of each layer for each micro-batch on one device: {(layer, number): flat gradient}.

    weights[number]: the values of each layer to use for that micro-batch; default: the initial ones.
    """
    layers, result = build_layers(layers), {}
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
    """Add arrays one after the other. Floating-point addition is not associative: the order is part of the result."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


# --- 1. ZeRO 3 --------------------------------------------------------------------------------------------------------


def zero3(comm, micro_batches=2):
    """Keep the parameters as shards: gather a layer for its forward and its backward, and scatter its gradient's sum.

    The reductions run in a separate stream while backward goes on. Returns this rank's shard of the summed
    gradient of each layer, added over micro-batches after each reduction.
    """
    layers = build_layers()
    units = [FlatParameters(layer.parameters(), pad_to=comm.size) for layer in layers]
    counts = [chunk_sizes(unit.padded_numel, comm.size) for unit in units]
    mine = [slice(comm.rank * c[0], (comm.rank + 1) * c[0]) for c in counts]  # padded, so all shards are equal
    shards = [unit.release()[place].copy() for unit, place in zip(units, mine, strict=True)]
    sums = [None] * LAYERS

    def gathered(i):
        with purpose("parameter_gather"):
            units[i].bind(all_gather(comm, shards[i]), version=units[i].version)
        return units[i]

    for k in range(micro_batches):
        # Forward: one layer at a time is whole. The graph keeps parameters, not their arrays: release frees the memory.
        inputs, outputs, works = [], [], []
        x = micro_batch(comm.rank * micro_batches + k)
        for i, layer in enumerate(layers):
            gathered(i)
            inputs.append(Tensor(x, requires_grad=True))
            outputs.append(layer(inputs[i]))
            x = outputs[i].data
            units[i].release()

        # Backward: gather again, differentiate, start to reduce, release.
        gradient = loss_gradient(x)
        for i in reversed(range(LAYERS)):
            gathered(i).zero_grad()
            outputs[i].backward(gradient, observers=[Progress(comm)])
            gradient = inputs[i].grad
            with purpose("gradient_reduce"):
                works.append(reduce_scatter(comm, units[i].grad, algorithm="ordered", async_op=True))
            units[i].release()

        for i, work in zip(reversed(range(LAYERS)), works, strict=True):
            shard = work.wait()
            sums[i] = shard if sums[i] is None else sums[i] + shard
    return sums


# --- 2. a pipeline ----------------------------------------------------------------------------------------------------


def one_f_one_b(comm, micro_batches=5, forward_seconds=0.0, backward_seconds=0.0):
    """Run 1F1B on `comm.size` stages of one layer each.

        stage 0   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4      p-1-s forwards to fill the pipeline,
        stage 1      F0 F1 B0 F2 B1 F3 B2 F4 B3 B4   then one forward and one backward in turn,
        stage 2         F0 B0 F1 B1 F2 B2 F3 B3 ...  then the backwards that are left

    Returns the stage's gradient, added in the order of its backwards.
    """
    p, s, m = comm.size, comm.rank, micro_batches
    layer = build_layers(p)[s]
    flat = FlatParameters(layer.parameters())
    alive, sends = {}, []  # inputs and outputs between a forward and its backward; sends that are not waited for yet

    def forward(i):
        x = micro_batch(i) if s == 0 else np.empty((ROWS, WIDTH), np.float32)  # a new buffer: backward needs it
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

    run_1f1b(p, s, m, forward, backward)
    comm.waitall(sends)
    return flat.grad.copy()


def run_1f1b(p, s, m, forward, backward):
    """Call forward(i) and backward(i) for all m micro-batches in the order that 1F1B gives stage s of p."""
    warm_up = min(m, p - 1 - s)
    for i in range(warm_up):
        forward(i)
    for i in range(m - warm_up):
        forward(warm_up + i)
        backward(i)
    for i in range(m - warm_up, m):
        backward(i)


# --- 3. a pipeline that never flushes ---------------------------------------------------------------------------------


def weight_stashing(comm, micro_batches=6):
    """Run PipeDream: update after every backward; each backward uses the weights that its forward saw.

    Returns the stage's weights after each update, and the version that each micro-batch used.
    """
    p, s, m = comm.size, comm.rank, micro_batches
    layer = build_layers(p)[s]
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
        latest, version = latest - LEARNING_RATE * flat.grad, version + 1  # a new array: the old one is in the stash
        history.append(latest)

    run_1f1b(p, s, m, forward, backward)
    comm.waitall(sends)
    return history, used


# --- run them, and compare with one device ----------------------------------------------------------------------------


def main(comm):
    n, s = comm.size, comm.rank

    # ZeRO 3: each micro-batch is summed over the ranks in rank order, then the micro-batches are added.
    parts = contributions(range(2 * n))
    for i, shard in enumerate(zero3(comm)):
        whole = in_order([in_order([parts[i, 2 * rank + k] for rank in range(n)]) for k in range(2)])
        mine = whole[s * shard.size : (s + 1) * shard.size]
        assert np.array_equal(shard[: mine.size], mine)
        assert not shard[mine.size :].any()  # padding

    # 1F1B: a stage's gradient is the sum over micro-batches, in order.
    parts = contributions(range(5), layers=n)
    assert np.array_equal(one_f_one_b(comm), in_order([parts[s, i] for i in range(5)]))

    # PipeDream: stage s uses weights that are p-1-s updates old, once the pipeline is full. One device with the weights
    # of these versions makes the same updates.
    history, used = weight_stashing(comm)
    assert used == [max(0, t - (n - 1 - s)) for t in range(6)]
    versions = all_gather(comm, np.stack(history)).reshape(n, *np.shape(history))  # stage, version, parameter
    weights = [[versions[stage, max(0, t - (n - 1 - stage))] for stage in range(n)] for t in range(6)]
    parts = contributions(range(6), weights, layers=n)
    for t in range(6):
        assert np.array_equal(history[t + 1], history[t] - LEARNING_RATE * parts[s, t])

    print(f"rank {s} of {n}: all three equal one device bit for bit; weight versions used {used}", flush=True)


if __name__ == "__main__":
    launch(main)
