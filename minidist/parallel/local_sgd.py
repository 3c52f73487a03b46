"""Local SGD: every rank trains alone for H steps, then the weights are averaged. It communicates H times less often.

    rank 0   step step step ─┐         ┌─ step step step ─┐
    rank 1   step step step ─┼ average ┼─ step step step ─┼ average ...        H = 3
    rank 2   step step step ─┘         └─ step step step ─┘

With H = 1 and plain SGD it is data parallelism: the average of w - lr g_r is w - lr times the average gradient. With
larger H the ranks compute gradients at different weights, which is another algorithm; optimizer state stays local.

Source: Stich, Local SGD converges fast and communicates little, ICLR 2019.
Proved by: tests/parallel/test_compression.py, tests/train/test_local_steps.py
"""

from typing import Any

import numpy as np

from minidist.base.limits import check_whole
from minidist.base.trace import purpose
from minidist.collectives import all_reduce, broadcast
from minidist.comm import Comm
from minidist.nn.flat import FlatParameters
from minidist.parallel.axes_check import check_axes
from minidist.parallel.gradients import mode_of, next_model
from minidist.parallel.running_statistics import batch_norms


def local_sgd_volume(parameters: int, ranks: int) -> dict[str, int]:
    """Return the elements that all `ranks` together send per average of so many parameters: an all-reduce."""
    return {"parameter_gather": 2 * (ranks - 1) * parameters}


class PeriodicModelAverager:
    """Averages the weights over `comm` at each `every`-th call of `step()`, which follows each optimizer step.

    module: whose running statistics of batch normalisation are averaged, too; without it each rank keeps its own.
    At construction rank 0's weights are sent to all ranks (purpose startup). An average sends the all-reduce's volume
    of the weights, 2 (n-1)/n of their bytes, from each rank (purpose parameter_gather).
    """

    def __init__(
        self, flat: FlatParameters, comm: Comm, every: int, *, algorithm: str = "ring", module: Any = None
    ) -> None:
        check_axes("PeriodicModelAverager", module, flat.parameters, comm)
        check_whole(f"rank {comm.rank}: every", every, 1)
        self.flat, self.comm, self.every, self.algorithm = flat, comm, every, algorithm
        self.module, self.number = module, next_model(comm)
        self.norms = [] if module is None else batch_norms(module)
        self.steps = 0
        # All ranks start from the same weights; between averages they differ.
        with purpose("startup"):
            broadcast(comm, flat.data)

    def step(self) -> bool:
        """Count a step; return True when the weights were averaged."""
        self.steps += 1
        if self.steps % self.every:
            return False
        self.average()
        return True

    def average(self) -> None:
        """Average the weights now (at the end of training, when `every` does not divide the steps)."""
        # Ranks that have made unlike steps, or by other settings, would be averaged all the same.
        equal = f"model {self.number} after {self.flat.updates}{mode_of(self.module)}"
        with purpose("parameter_gather"):
            all_reduce(self.comm, self.flat.data, "avg", algorithm=self.algorithm, equal=equal)
        # The statistics that go with these weights: 8 B per number, as the weights are.
        if self.norms:
            words = np.concatenate([statistic for layer in self.norms for statistic in layer.running])
            with purpose("metrics"):
                all_reduce(self.comm, words, "avg", algorithm=self.algorithm)
            for layer in self.norms:
                channels = layer.weight.size
                mean, variance, words = words[:channels], words[channels : 2 * channels], words[2 * channels :]
                layer.load_buffers({"running_mean": mean, "running_var": variance})

        # The values changed without an optimizer's step; whoever caches a copy of them must know.
        self.flat.updated()
