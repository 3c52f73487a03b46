"""A ledger of the samples: each is read once per epoch, over any number of ranks; a rank that reads others is named.

mpiexec -n 2 python mpi_examples/7_more/data_ledger.py
python mpi_examples/7_more/data_ledger.py --ranks 3

Two epochs of ten samples are read, four per step, so epochs end within steps. After every step the ranks compare the
digest of what they have read with that of what is next: 40 B from each rank to every other one. In a second run every
rank reads the rows of rank 0, as when a loader is not told its rank.
"""

import numpy as np

from minidist import MismatchError, launch
from minidist.data import GlobalBatchSampler, TokenDataset
from minidist.techniques.data_ledger.ledger import DataLedger

SAMPLES, BATCH, CONTEXT, STEPS = 10, 4, 8, 5


def read(comm, rank):
    """Read the rows of `rank` in every step, and check after each; returns how many samples all ranks have read."""
    tokens = TokenDataset("numbers", np.arange(SAMPLES * CONTEXT + 1), SAMPLES * CONTEXT + 1)
    sampler, ledger = GlobalBatchSampler(tokens, BATCH, CONTEXT, seed=0), DataLedger(SAMPLES, seed=0)
    for step in range(STEPS):
        first, end = (BATCH * r // comm.size for r in (rank, rank + 1))
        batch = sampler.batch(step, first, end - first)  # inputs and targets, on which a model would train
        ledger.expect(BATCH)
        ledger.record(batch.indices)
        ledger.check(comm, 0, f"step {step}")
    return ledger.done


def main(comm):
    done = read(comm, comm.rank)
    report = "" if comm.size > 1 else "one rank has all rows"
    try:
        read(comm, 0)
    except MismatchError as error:
        report = str(error).split(";")[0]
    print(f"rank {comm.rank}: {done} samples, each once per epoch; without its rank: {report}", flush=True)


if __name__ == "__main__":
    launch(main)
