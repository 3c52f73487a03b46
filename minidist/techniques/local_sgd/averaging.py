"""Local SGD: every rank trains alone for H steps, then the weights are averaged. It communicates H times less often.

    rank 0   step step step ─┐         ┌─ step step step ─┐
    rank 1   step step step ─┼ average ┼─ step step step ─┼ average ...        H = 3
    rank 2   step step step ─┘         └─ step step step ─┘

With H = 1 and plain SGD it is data parallelism: the average of w - lr g_r is w - lr times the average gradient. With
larger H the ranks compute gradients at different weights, which is another algorithm; optimizer state stays local.
Ranks with different numbers of rows are averaged with weights in proportion to them, as in federated averaging: w is
the sum of n_r / n w_r. A replica may be several ranks that share its weights (ZeRO, FSDP): each averages its shard with
the ranks that have the same shard of the other replicas, before the weights are gathered inside the replica:

    replica 0   rank 0 | a0 |      rank 1 | a1 |        the ranks of a replica share its weights: one shard each
    replica 1   rank 2 | b0 |      rank 3 | b1 |
                         └ meet ┘    └ meet ┘           averages and outer steps treat every element by itself

DiLoCo takes the difference of the last common weights and the average as the gradient of an outer optimizer, SGD with
Nesterov's momentum, whose step is the same on all ranks, so that H may be in the hundreds. The ranks' own optimizers,
usually AdamW, are the inner ones and keep their state.

    common weights ── H inner steps on each rank ── average ── common -= outer lr (d + mu b),  d = common - average,
                                                               b = mu b + d

Sources: Stich, Local SGD converges fast and communicates little, ICLR 2019; McMahan et al., Communication-efficient
learning of deep networks from decentralized data, AISTATS 2017, algorithm 1; Douillard et al., DiLoCo,
arXiv:2311.08105, algorithm 1.
Proved by: tests/techniques/test_averaging.py, tests/techniques/test_local_steps.py,
tests/techniques/test_sharded_replicas.py
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from minidist.base.limits import check_number, check_whole
from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose, track
from minidist.core.collectives import all_reduce, broadcast
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters
from minidist.core.optim import flat_slices
from minidist.core.parallel.zero import Shard
from minidist.optim import SGD, OptimizerWrapper
from minidist.parallel.replica_guard import check_axes, mode_of, next_model
from minidist.parallel.running_statistics import batch_norms

Part = FlatParameters | Shard  # has `data`, 1-D, and `updated()`


def parts_of(weights: Part | Iterable[Part]) -> list[Part]:
    """Return the flat arrays or the shards that are given: one, or several, such as `shards_of(model)`."""
    return [weights] if isinstance(weights, FlatParameters | Shard) else list(weights)


def flat_of(part: Part) -> FlatParameters:
    """Return the part itself, or the flat parameters that it is a shard of."""
    return part.flat if isinstance(part, Shard) else part


def place_of(part: Part, parameter: Parameter) -> slice:
    """Return where the elements of a parameter lie in `part.data`; a shard may have none of them."""
    whole = flat_of(part).slice_of(parameter)
    return part.place(whole) if isinstance(part, Shard) else whole


def trainable(parts: Iterable[Part]) -> Iterator[tuple[Part, Parameter]]:
    """Yield each trainable parameter of the parts, with its part."""
    for part in parts:
        for parameter in flat_of(part).parameters:
            if parameter.requires_grad:
                yield part, parameter


class PeriodicModelAverager:
    """Averages the weights over `comm` at each `every`-th call of `step()`, which follows each optimizer step.

    weights: a `FlatParameters`, or this rank's shards of a replica that several ranks share (`shards_of(model)`, or the
    `shard` of a `ZeroOptimizer`); `comm` then has the ranks with the same shards.
    module: whose running statistics of batch normalisation are averaged, too; without it each rank keeps its own.
    share: this rank's rows over those of all ranks, where ranks train on different numbers of rows; the shares of all
    ranks are the weights of the average. Default: all ranks count equally.
    At construction rank 0's weights are sent to all ranks (purpose startup). An average sends the all-reduce's volume
    of the weights, 2 (n-1)/n of their bytes, from each rank (purpose parameter_gather).
    """

    def __init__(
        self,
        weights: Part | Iterable[Part],
        comm: Comm,
        every: int,
        *,
        algorithm: str = "ring",
        module: Any = None,
        share: float | None = None,
    ) -> None:
        self.parts = parts_of(weights)
        for part in self.parts:
            check_axes("PeriodicModelAverager", module, flat_of(part).parameters, comm)
        check_whole(f"rank {comm.rank}: every", every, 1)
        self.comm, self.every, self.algorithm = comm, every, algorithm
        self.module, self.number, self.share = module, next_model(comm), share
        if share is not None:
            check_number(f"rank {comm.rank}: share", share, above=0)
        self.norms = [] if module is None else batch_norms(module)
        self.steps = 0
        # All ranks start from the same weights; between averages they differ.
        with purpose("startup"):
            for part in self.parts:
                broadcast(comm, part.data)

    def step(self) -> bool:
        """Count a step; return True when the weights were averaged."""
        self.steps += 1
        if self.steps % self.every:
            return False
        self.average()
        return True

    def average(self) -> None:
        """Average the weights now (at the end of training, when `every` does not divide the steps)."""
        for part in self.parts:
            # Ranks with different numbers of steps, or with different settings, would be averaged without an error.
            equal = f"model {self.number} after {flat_of(part).updates}{mode_of(self.module)}"
            with purpose("parameter_gather"):
                self._average(part.data, equal)
        # The statistics that go with these weights: 8 B per number, as the weights are.
        if self.norms:
            words = xp.concatenate([statistic for layer in self.norms for statistic in layer.running])
            with purpose("metrics"):
                self._average(words)
            for layer in self.norms:
                channels = layer.weight.size
                mean, variance, words = words[:channels], words[channels : 2 * channels], words[2 * channels :]
                layer.load_buffers({"running_mean": mean, "running_var": variance})

        # The values changed without an optimizer's step; whoever caches a copy of them must know.
        for part in self.parts:
            part.updated()

    def _average(self, array: xp.Array, equal: str = "") -> None:
        """Replace `array` by the mean over the ranks, or by the sum of each rank's array times its share."""
        if self.share is not None:
            array *= array.dtype.type(self.share)
        op = "avg" if self.share is None else "sum"
        all_reduce(self.comm, array, op, algorithm=self.algorithm, equal=equal)


OUTER = "outer_momentum"  # the name of the outer momentum in the state of a parameter


@dataclass
class _Common:
    """The weights with which all ranks began the round, and the outer gradient: what the outer optimizer steps."""

    data: xp.Array
    grad: xp.Array | None = None


class OuterOptimizer(OptimizerWrapper):
    """An inner optimizer of `weights` whose rounds end with an outer step: SGD with Nesterov's momentum (DiLoCo).

        optimizer = OuterOptimizer(AdamW(flat, lr=3e-4), flat)
        average = PeriodicModelAverager(flat, comm, every=100)
        ...
        optimizer.step()
        if average.step():
            optimizer.outer_step()

    weights: as for `PeriodicModelAverager`. lr, momentum: of the outer optimizer. It sends nothing; every rank makes
    the same step of the averaged weights. It holds the common weights and the momentum, which `state` has next to the
    inner optimizer's, as "outer_momentum".
    """

    def __init__(self, optimizer: Any, weights: Part | Iterable[Part], lr: float = 0.7, momentum: float = 0.9) -> None:
        self.optimizer, self.parts = optimizer, parts_of(weights)
        self.common = [_Common(track(xp.array(part.data), "optimizer")) for part in self.parts]
        # The trainable elements of the parts, with the data and the gradient of `common`.
        pieces = [
            [
                replace(piece, source=common)
                for piece in (part.slices() if isinstance(part, Shard) else flat_slices(part))
            ]
            for part, common in zip(self.parts, self.common, strict=True)
        ]
        self.outer = SGD(pieces, lr, momentum=momentum, nesterov=momentum > 0)

    def begin_round(self) -> None:
        """Take the weights as they are for those of all ranks: after a broadcast, or a checkpoint."""
        for part, common in zip(self.parts, self.common, strict=True):
            common.data[...] = part.data

    def outer_step(self) -> None:
        """Step the common weights towards the average, which the weights are now, and begin the next round there."""
        for part, common in zip(self.parts, self.common, strict=True):
            common.grad = common.data - part.data
        self.outer.step()
        for part, common in zip(self.parts, self.common, strict=True):
            part.data[...] = common.data
            part.updated()

    def state_names(self, dtype: Any, name: str) -> list[str]:
        """Return the names of the state arrays of parameter `name`; the momentum exists after the first outer step."""
        outer = [OUTER] if self.outer.momentum and self.outer.step_count else []
        return [*self.optimizer.state_names(dtype, name), *outer]

    @property
    def state(self) -> dict[str, dict[str, xp.Array]]:
        """The state of both optimizers, by parameter."""
        result = {name: dict(arrays) for name, arrays in self.optimizer.state.items()}
        for name, arrays in self.outer.state.items():
            for array in arrays.values():  # without a momentum there is none
                result.setdefault(name, {})[OUTER] = array
        return result

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a `state_dict`, and let the weights as they are be the common ones."""
        inner = {name: {k: a for k, a in arrays.items() if k != OUTER} for name, arrays in saved["state"].items()}
        outer = {name: {"momentum_buffer": arrays[OUTER]} for name, arrays in saved["state"].items() if OUTER in arrays}
        self.optimizer.load_state_dict({**saved, "state": {name: arrays for name, arrays in inner.items() if arrays}})
        self.outer.load_state_dict({"step": saved["step"], "state": outer})
        self.begin_round()
