"""Data-parallel training on the host or on a GPU: the same program, and the same bytes between ranks.

mpiexec -n 2 python mpi_examples/7_more/device.py                     (--device cuda: needs CuPy and a GPU)
python mpi_examples/7_more/device.py --ranks 2                        the same ranks in one process

`Module.to` moves the parameters; inside `creating_on` new arrays are made on the device. Nothing else knows where
arrays are: gradients, the optimizer's states and messages follow the parameters.
"""

import sys

from minidist import GPT, AdamW, DistributedDataParallel, GPTConfig, launch, load_dataset
from minidist.base import arrays as xp
from minidist.base.device import creating_on, device_of
from minidist.data import GlobalBatchSampler

BATCH, LENGTH, STEPS = 8, 32, 10


def train(comm):
    name = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"
    device = device_of(name)
    model = GPT(GPTConfig(256, LENGTH, 32, 2, 4)).to(device)
    sampler = GlobalBatchSampler(load_dataset("pydoc"), BATCH, LENGTH, seed=0)
    share = BATCH // comm.size
    losses = []
    with creating_on(device):
        ddp = DistributedDataParallel(model, comm)
        optimizer = AdamW(ddp.parameters(), lr=1e-2)
        for step in range(STEPS):
            tokens, targets = (xp.to_device(rows) for rows in sampler.batch(step, comm.rank * share, share))
            ddp.zero_grad()
            loss = ddp(tokens, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    weights = sum(float(xp.absolute(p.data).sum()) for p in model.parameters())
    sent = comm.trace.bytes_by_purpose().get("gradient_reduce", 0)
    print(
        f"rank {comm.rank} of {comm.size} on {name}: loss {losses[0]:.2f} -> {losses[-1]:.2f}; |w| = {weights:.2f};"
        f" sent {sent:,} B of gradients",
        flush=True,
    )


launch(train)
