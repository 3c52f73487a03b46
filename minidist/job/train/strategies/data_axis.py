"""What a job asks of a data axis: what this rank holds of it, for checkpoints, techniques, comparisons and volumes.

`train/data_axis.py` has the phases of a step. The classes here add to each of its classes: a rank's place among the
replicas, its weights, gradients and state by parameter, whole tensors by name, and the element counts from which the
bytes that it sends follow.

Proved by: tests/equality/test_equality.py, tests/train/test_against_numpy.py
"""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array, is_half
from minidist.core.comm import Comm
from minidist.core.train import data_axis
from minidist.job.checkpoint.held import SINGLE, LocalShard, ReplicaId
from minidist.nn.segments import recomputed_modules
from minidist.optim import block_square_sums, clip_by_norm_
from minidist.parallel import reduced_elements
from minidist.parallel.running_statistics import batch_norms

Tensors = dict[str, dict[str, Array]]  # "gradients", "weights", "optimizer" -> name -> values


@dataclass(frozen=True)
class AxisSizes:
    """Element counts of one data axis of a rank, from which the bytes it sends follow.

    units: elements of each flat unit, with padding. buckets: of each gradient message. parameters: of each
    trainable parameter (this rank's shard of it). held: number of parameter shards on this rank. reduced: elements
    that all ranks of the axis together send per reduction of gradients, where the algorithm is neither ring nor
    ordered. resident: elements of units that stay whole (small parameters under ZeRO 3). more: what the job's
    techniques add (`Extension.sizes`). norms: channels of each batch norm whose statistics are combined over the axis.
    norms_again: of those whose forward runs again in backward.
    """

    stage: int
    experts: bool
    units: list[int]
    buckets: list[int]
    parameters: dict[str, int]
    held: int = 0
    reduced: int | None = None
    resident: int = 0
    norms: tuple[int, ...] = ()
    norms_again: tuple[int, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


class Replicas(NamedTuple):
    """A rank's number among the ranks that hold the same weights, and among those with the same optimizer state.

    prefix: of the names of optimizer state in a checkpoint, when each replica has its own state.
    """

    weights: ReplicaId = SINGLE
    state: ReplicaId = SINGLE
    prefix: str = ""


class DataAxis(data_axis.DataAxis):
    """Parameters that lie whole on this rank, as a job sees them. techniques: state of techniques, by their keys."""

    @cached_property
    def techniques(self) -> dict[str, Any]:
        return {}

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters of the axis."""
        return [parameter for flat in self.flats for parameter in flat.parameters]

    @property
    def replicas(self) -> Replicas:
        """Which replicas this rank holds."""
        return Replicas() if self.place is None else self.replicas_on(self.place)

    def replicas_on(self, comm: Comm) -> Replicas:
        """Return which replicas rank `comm.rank` of the data axis holds."""
        return Replicas()

    def seen_from(self, comm: Comm) -> Self:
        """Return this axis with what rank `comm.rank` of it has in a checkpoint: the shapes, and no values."""
        other = copy(self)
        other.place = comm
        return other

    def gradient_holders(self) -> Any:
        """Return the objects that have this rank's gradients as `.grad`."""
        return self.flats

    def square_sums(self, skip: Collection[Parameter] = ()) -> Array:
        """Return sums of squares of the axis's gradient by blocks of 1,024 elements, without parameters in `skip`."""
        # Elements in `skip` count as zeros, so that blocks stay where they are.
        (flat,) = self.flats
        return block_square_sums(flat.grad, [flat.slice_of(p) for p in flat.parameters if p in skip])

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale all gradients, whose norm over all axes is `norm`; 16-bit ones are scaled when the step reads them."""
        # Scaling a 16-bit gradient in place would lose bits; the optimizer multiplies after the upcast.
        half = is_half(self.flats[0].dtype)
        clip_by_norm_(self.gradient_holders(), norm, max_norm, self.optimizer if half else None)

    def gradients(self) -> list[Array]:
        """Return the flat arrays of the summed gradient, or this rank's shards of them, padded with zeros."""
        return [flat.grad for flat in self.flats]

    def gradient_shards(self) -> list[LocalShard]:
        """Return this rank's part of the summed gradient by parameter, as 1-D views."""
        return [LocalShard(p, p.grad.reshape(-1), 0, p.size) for p in self.parameters if p.grad is not None]

    def weights(self) -> list[LocalShard]:
        """Return the values that this rank keeps, as 1-D views."""
        return [LocalShard(p, p.data.reshape(-1), 0, p.size) for p in self.parameters]

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        """Return (parameter, start, stop) of the elements for which this rank's optimizer has state."""
        return [(p, 0, p.size) for p in self.parameters if p.requires_grad]

    def local_arrays(self) -> list[Array]:
        """Return the flat weights that this rank holds."""
        return [flat.data for flat in self.flats]

    def updated(self) -> None:
        """Note that the weights were overwritten, by a checkpoint for example."""
        for flat in self.flats:
            flat.updated()

    def tensors(self) -> Tensors:
        """Return copies by name, whole on this axis (sharded over others). Every rank calls it, to gather shards."""
        return {
            "gradients": {p.name: xp.array(gradient_of(p)) for p in self.parameters if p.requires_grad},
            "weights": {p.name: xp.array(p.data) for p in self.parameters},
            "optimizer": {
                f"{name}.{key}": xp.array(a)
                for name, arrays in self.optimizer.state.items()
                for key, a in arrays.items()
            },
        }

    def sizes(self) -> AxisSizes:
        """Return the element counts from which the closed forms of its volumes follow."""
        reduced = None
        if any(reducer.algorithm not in ("ring", "ordered") for reducer in self.reducers):
            reduced = sum(map(reduced_elements.of_reducer, self.reducers))
        return AxisSizes(
            self.stage,
            self.experts,
            units=[flat.padded_numel for flat in self.flats],
            # The elements of each bucket's message; there are no buckets without reducers.
            buckets=[bucket.size for reducer in self.reducers for bucket in reducer.buckets],
            parameters={p.name: p.size for p in self.parameters if p.requires_grad},
            held=len(self.weights()),
            reduced=reduced,
            norms=tuple(layer.weight.size for layer in batch_norms(self.model)),
            norms_again=tuple(n.weight.size for block in recomputed_modules(self.model) for n in batch_norms(block)),
        )


class Replicated(data_axis.Replicated, DataAxis):
    """Data parallelism in a job: every rank holds all parameters, gradients and optimizer state."""

    def replicas_on(self, comm: Comm) -> Replicas:
        replica = ReplicaId(comm.rank, comm.size)
        return Replicas(replica, replica)


def gradient_of(parameter: Parameter) -> Array:
    """Return the gradient of a parameter, zeros when it has none."""
    gradient = parameter.grad
    return xp.zeros(parameter.shape, parameter.dtype, parameter.data) if gradient is None else gradient
