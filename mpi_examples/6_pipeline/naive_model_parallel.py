"""Naive model parallelism: each rank holds one layer, and one batch goes through all of them before the next begins.

    mpiexec -n 3 python mpi_examples/6_pipeline/naive_model_parallel.py
    python mpi_examples/6_pipeline/naive_model_parallel.py --ranks 3

    rank 0    F ─┐                     ┌─ B
    rank 1       └─ F ─┐         ┌─ B ─┘            one rank works, all others wait
    rank 2             └─ F   B ─┘

It fits a model that is too large for one rank, and makes nothing faster: gpipe.py cuts the batch to fill the gaps.
"""

import numpy as np

from minidist import MLP, Adam, FlatParameters, Tensor, cross_entropy, glyphs, launch, purpose

STEPS, ROWS, WIDTH = 40, 16, 32


def train(comm):
    rank, last, data = comm.rank, comm.size - 1, glyphs()
    model = MLP([data.features, *[WIDTH] * last, data.classes])  # whole, from the seed; this rank keeps one layer
    layer = model.layers[rank]
    optimizer = Adam(FlatParameters(layer.parameters()), lr=0.005)
    for step in range(STEPS):
        layer.zero_grad()
        x, targets = data.rows(np.arange(step * ROWS, (step + 1) * ROWS) % 64)

        # Forward: wait for the rank before, compute, hand on.
        if rank > 0:
            x = np.empty((ROWS, WIDTH), np.float32)
            comm.recv(x, rank - 1)
        x = Tensor(x, requires_grad=rank > 0)
        y = layer(x)
        if rank < last:
            gradient = np.empty_like(y.data)
            with purpose("pipeline_activation"):
                comm.send(y.data, rank + 1)
            # Backward: wait for the rank behind, which says how the loss depends on y.
            comm.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = cross_entropy(y, targets)
            loss.backward()
            if step % 10 == 0 or step == STEPS - 1:
                print(f"step {step:2}  loss {loss.item():.4f}", flush=True)
        if rank > 0:
            with purpose("pipeline_gradient"):
                comm.send(x.grad, rank - 1)
        optimizer.step()

    # Every rank trains the whole model alone, too, and compares its layer.
    alone = one_device(MLP([data.features, *[WIDTH] * last, data.classes]), data).layers[rank]
    same = all(np.array_equal(a.data, b.data) for a, b in zip(layer.parameters(), alone.parameters(), strict=True))
    sent = sum(comm.trace.bytes_by_purpose().values())
    print(f"rank {rank}: sent {sent:,} B; its layer equals that of one device bit for bit: {same}", flush=True)


def one_device(model, data):
    optimizer = Adam(FlatParameters(model.parameters()), lr=0.005)
    for step in range(STEPS):
        model.zero_grad()
        x, targets = data.rows(np.arange(step * ROWS, (step + 1) * ROWS) % 64)
        cross_entropy(model(Tensor(x)), targets).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    launch(train)
