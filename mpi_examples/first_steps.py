import numpy as np

from minidist.autograd import Tensor, cross_entropy
from minidist.comm import launch
from minidist.data import glyphs
from minidist.nn import MLP
from minidist.optim import SGD
from minidist.parallel import DistributedDataParallel


def train(comm):  # one rank: alone, virtual, or a process of mpiexec
    images, labels = glyphs().rows(np.arange(64))
    mine = np.array_split(np.arange(64), comm.size)[comm.rank]
    model = DistributedDataParallel(MLP([images.shape[1], 32, 10]), comm, reduction="sum", algorithm="ordered")
    optimizer = SGD(model.flat, lr=0.5)
    for _ in range(20):
        model.flat.zero_grad()
        loss = cross_entropy(model(Tensor(images[mine])), labels[mine], divisor=64)
        loss.backward()  # the gradients are summed over the ranks while this runs
        optimizer.step()
    print(
        f"rank {comm.rank} of {comm.size}: |w| = {np.abs(model.flat.data).sum():.4f}, "
        f"sent {comm.trace.bytes_by_purpose().get('gradient_reduce', 0):,} bytes of gradients",
        flush=True,
    )


launch(train)
