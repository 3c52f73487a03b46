import numpy as np

from minidist import MLP, SGD, DistributedDataParallel, Tensor, cross_entropy, glyphs, launch


def train(comm):  # one rank: alone, simulated, or a process of mpiexec
    images, labels = glyphs().rows(np.arange(comm.rank, 64, comm.size))  # this rank's rows of the batch
    model = DistributedDataParallel(MLP([images.shape[1], 32, 10]), comm, reduction="sum")
    optimizer = SGD(model.flat, lr=0.5)
    for _ in range(20):
        model.flat.zero_grad()
        loss = cross_entropy(model(Tensor(images)), labels, divisor=64)  # a row counts 1/64, on whichever rank it is
        loss.backward()  # sums the gradients over the ranks while it runs
        optimizer.step()
    norm, sent = np.abs(model.flat.data).sum(), comm.trace.bytes_by_purpose().get("gradient_reduce", 0)
    print(f"rank {comm.rank} of {comm.size}: |w| = {norm:.4f}, sent {sent:,} bytes of gradients", flush=True)


launch(train)
