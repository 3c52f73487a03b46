"""ZeRO 1 and 2 on one page: every rank steps its shard with its part of the optimizer, then parameters are gathered.

mpiexec -n 4 python mpi_examples/3_sharding/zero.py
python mpi_examples/3_sharding/zero.py --ranks 4
"""

from minidist import GPT, AdamW, GPTConfig, ZeroOptimizer, batch_coordinates, global_loss, launch, load_dataset
from minidist.base.memory import account_memory
from minidist.data import GlobalBatchSampler

STEPS, ROWS, CONTEXT, MICRO_BATCHES = 3, 2, 32, 2  # rows of a micro-batch


def train(comm, stage):
    sampler = GlobalBatchSampler(load_dataset("pydoc"), ROWS * MICRO_BATCHES * comm.size, CONTEXT, seed=0)
    divisor = ROWS * MICRO_BATCHES * comm.size * CONTEXT
    with account_memory() as account:
        model = GPT(GPTConfig(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4), seed=0)
        zero = ZeroOptimizer(model, AdamW, comm=comm, stage=stage, reduction="sum", reduce_bucket_size=20_000, lr=3e-3)

        # Each rank computes its micro-batches of the global batch; the divisor is the global number of tokens.
        before = dict(comm.trace.bytes_by_purpose())
        for step in range(STEPS):
            zero.zero_grad()
            losses = []
            for i in range(MICRO_BATCHES):
                first = (comm.rank * MICRO_BATCHES + i) * ROWS
                tokens, targets = sampler.batch(step, first, ROWS)
                with batch_coordinates(step, first):
                    loss = model(tokens, targets, divisor)
                    if stage == 1 and i < MICRO_BATCHES - 1:
                        with zero.no_sync():
                            loss.backward()
                    else:
                        loss.backward()  # meanwhile, the gradients are reduced to their owners
                losses.append(loss.item())
            zero.clip_grad_norm_(1.0)
            zero.step()

        # Psi: bytes of the parameters, with padding.
        total = global_loss(comm, losses)
        sent = comm.trace.bytes_by_purpose()
        if comm.rank == 0:
            psi = zero.flat.padded_numel * 4 * STEPS
            print(f"stage {stage}: loss {total:.4f}, optimizer state {account.by_purpose['optimizer']:,} B a rank")
            for name in ("gradient_reduce", "parameter_gather"):
                volume = sent.get(name, 0) - before.get(name, 0)
                print(f"  {name:16} {volume:10,} B = {volume / psi:.2f} Psi", flush=True)


def main(comm):
    for stage in (1, 2):
        train(comm, stage)


if __name__ == "__main__":
    launch(main)
