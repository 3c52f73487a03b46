"""1F1B by hand, on one page, without the pipeline runtime: send, recv, and the order that keeps few activations alive.

    mpiexec -n 4 python mpi_examples/6_pipeline/one_f_one_b.py
    python mpi_examples/6_pipeline/one_f_one_b.py --ranks 4

    rank 0   F0 F1 F2 F3 B0 F4 B1 ...     p-1-s forwards fill the pipeline, then one forward and one backward in turn
    rank 3            F0 B0 F1 B1 ...     the last rank fills nothing; rank s keeps at most p-s micro-batches alive

Each rank also trains the whole model alone and compares: the gradient of its stage is equal bit for bit. The same
schedule as a list of actions is in minidist/core/pipeline/schedules.py.
"""

import numpy as np

from minidist import Linear, Tensor, launch

MICROBATCHES, ROWS, WIDTH = 8, 4, 16


def layer(s):
    """Build stage s of the model. Every rank can build every stage, with the same values."""
    return Linear(WIDTH, WIDTH, activation="relu", seed=None).initialize(seed=7, prefix=f"layers.{s}")


def micro_batch(i):
    """Return the inputs of micro-batch i, float32."""
    return np.random.default_rng(i).standard_normal((ROWS, WIDTH)).astype(np.float32)


def train(comm):
    """Run 1F1B on stage `comm.rank`, and assert that its gradient equals one device's."""
    p, s, m = comm.size, comm.rank, MICROBATCHES
    stage, alive, sends, most = layer(s), {}, [], 0

    def forward(i):
        nonlocal most
        x = micro_batch(i) if s == 0 else np.empty((ROWS, WIDTH), np.float32)  # a new buffer: backward needs it
        if s > 0:
            comm.recv(x, s - 1, tag=i)
        x = Tensor(x, requires_grad=True)
        alive[i] = x, stage(x)
        most = max(most, len(alive))
        if s < p - 1:
            sends.append(comm.isend(alive[i][1].data, s + 1, tag=i))

    def backward(i):
        x, y = alive.pop(i)
        gradient = np.ones((ROWS, WIDTH), np.float32)  # the loss is the sum of the outputs
        if s < p - 1:
            comm.recv(gradient, s + 1, tag=m + i)
        y.backward(gradient)
        if s > 0:
            sends.append(comm.isend(x.grad, s - 1, tag=m + i))

    # The schedule: fill, one forward and one backward in turn, drain.
    warm_up = min(m, p - 1 - s)
    for i in range(warm_up):
        forward(i)
    for i in range(m - warm_up):
        forward(warm_up + i)
        backward(i)
    for i in range(m - warm_up, m):
        backward(i)
    comm.waitall(sends)

    # One device: the same micro-batches through all layers.
    layers = [layer(number) for number in range(p)]
    for i in range(m):
        x = Tensor(micro_batch(i))
        for one in layers:
            x = one(x)
        x.backward(np.ones((ROWS, WIDTH), np.float32))
    same = np.array_equal(stage.weight.grad, layers[s].weight.grad)
    print(
        f"rank {s}: at most {most} micro-batches alive of {m}; gradient equals one device's bit for bit: {same}",
        flush=True,
    )
    assert same


if __name__ == "__main__":
    launch(train)
