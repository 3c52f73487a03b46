"""ZeRO 1 in float16: half the bytes on the wire, float32 masters on their owners, and a loss scale that ranks share.

mpiexec -n 4 python mpi_examples/7_more/mixed_precision.py          (--bfloat16: no loss scale needed)
python mpi_examples/7_more/mixed_precision.py --ranks 4             the same ranks in one process
"""

import sys

import numpy as np

from minidist import GPT, AdamW, GPTConfig, ZeroOptimizer, launch, load_dataset
from minidist.base.half import named_dtype
from minidist.data import GlobalBatchSampler
from minidist.optim import DynamicLossScaler
from minidist.parallel import scaled_step

BATCH, LENGTH, STEPS = 12, 32, 20


def train(comm):
    dtype = named_dtype("bfloat16" if "--bfloat16" in sys.argv else "float16")
    model = GPT(GPTConfig(256, LENGTH, 32, 2, 4), dtype=dtype)
    zero = ZeroOptimizer(model, AdamW, comm=comm, stage=1, reduction="sum", algorithm="ordered", lr=1e-2)
    # The first scale is too large: steps are skipped until it fits. bfloat16 has float32's range and needs none.
    scaler = DynamicLossScaler(2.0**18, hysteresis=1) if dtype == np.float16 else None
    sampler = GlobalBatchSampler(load_dataset("pydoc"), BATCH, LENGTH, seed=0)
    mine = np.array_split(np.arange(BATCH), comm.size)[comm.rank]
    losses = []
    for step in range(STEPS):
        zero.zero_grad()
        loss = model(*sampler.batch(step, int(mine[0]), len(mine)), float(BATCH * LENGTH))
        losses.append(loss.item() * BATCH / len(mine))
        if scaler is None:
            loss.backward()
            zero.clip_grad_norm_(1.0)
            zero.step()
        else:
            scaler.scale_loss(loss).backward()
            # Agree on overflow (1 byte), unscale, clip, step, gather.
            scaled_step(comm, scaler, zero, [zero.shard.grad], clip=lambda: zero.clip_grad_norm_(1.0))
    sent = comm.trace.bytes_by_purpose()
    scale = "" if scaler is None else f", loss scale {scaler.scale:,.0f}, steps skipped: {scaler.skipped}"
    print(
        f"rank {comm.rank} of {comm.size}: loss {losses[0]:.2f} -> {losses[-1]:.2f}{scale}; |w| ="
        f" {np.abs(zero.flat.data.astype(float)).sum():.6f}; sent {sent.get('gradient_reduce', 0):,} B of gradients,"
        f" {sent.get('overflow', 0)} B of overflow flags",
        flush=True,
    )


launch(train)
