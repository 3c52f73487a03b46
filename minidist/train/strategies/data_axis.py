"""A data axis: one stage's parameters on the ranks that compute with other rows, and what everybody asks of it.

A model that no pipeline cuts is one stage. Each stage of a pipeline has a data axis of its own, and so have the experts
when they are dealt out, because other ranks hold the same ones. The questions to each of them are the same: what are
the squares of your gradients, step, what do you hold. The answers of one rank alone stand here; ranks that share are in
data_axes.py.
"""

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from minidist.autograd import Parameter
from minidist.base.arrays import Array
from minidist.base.half import is_half
from minidist.nn.flat import FlatParameters
from minidist.optim import block_square_sums, clip_by_norm_
from minidist.parallel import GradientReducer
from minidist.parallel.flat_shards import Shard
from minidist.planning.volumes import AxisSizes
from minidist.train.job import Job, make_optimizer

Tensors = dict[str, dict[str, Array]]  # "gradients", "weights", "optimizer" -> name -> values
Held = tuple[Parameter, Array, int, int]  # a parameter, this rank's values of it (1-D), and which elements they are


class DataAxis:
    """One rank alone: everything is here and nothing is sent. The base of the others."""

    stage = 0  # of the pipeline
    experts = False  # are these dealt-out experts?
    copies = (0, 1)  # (number of this rank, how many) among the ranks that hold the same weights ...
    state_copies = (0, 1)  # ... and the same optimizer state

    def __init__(self, job: Job, parameters: Iterable[Parameter]) -> None:
        self.flats = [FlatParameters(parameters)]
        self.optimizer = make_optimizer(job, self.flats[0])
        self.reducers: list[GradientReducer] = []
        self.shards: list[Shard] = []  # of the units, where they are sharded

    @property
    def parameters(self) -> list[Parameter]:
        """All of the stage's."""
        return [parameter for flat in self.flats for parameter in flat.parameters]

    # a step -----------------------------------------------------------------------------------------------------------

    def wrap(self, model: Any) -> Any:
        """The model whose plain `loss.backward()` sends what this way sends."""
        return model

    def by_hand(self) -> None:
        """From now on backward sends nothing by itself; somebody tells the reducers (a pipeline, once a step)."""

    def no_sync(self) -> AbstractContextManager[None]:
        """The gradients of a pass in the block stay on this rank."""
        return nullcontext()

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for flat in self.flats:
            flat.zero_grad()

    def square_sums(self, skip: Collection[Parameter] = ()) -> Array:
        """Sums of squares of the whole axis's gradient by blocks of 1,024 elements, without the parameters in `skip`."""
        (flat,) = self.flats
        return block_square_sums(flat.grad, [flat.slice_of(p) for p in flat.parameters if p in skip])

    def gradients(self) -> list[Array]:
        """What this rank holds of the summed gradient."""
        return [flat.grad for flat in self.flats]

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale all gradients, whose norm over all axes is `norm`; those of two bytes when the step reads them."""
        half = is_half(self.flats[0].dtype)
        clip_by_norm_(self.gradient_holders(), norm, max_norm, self.optimizer if half else None)

    def gradient_holders(self) -> Any:
        """Whatever has this rank's gradients as `.grad`."""
        return self.flats

    def step(self) -> None:
        """The optimizer's step, and whatever makes every rank's parameters new."""
        self.optimizer.step()

    # what is here -----------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """Copies by name, whole on this axis (still tiles on others). Every rank calls it: shards are gathered."""
        return {
            "gradients": {p.name: np.array(gradient_of(p)) for p in self.parameters if p.requires_grad},
            "weights": {p.name: np.array(p.data) for p in self.parameters},
            "optimizer": {
                f"{name}.{key}": np.array(a)
                for name, arrays in self.optimizer.state.items()
                for key, a in arrays.items()
            },
        }

    def weights(self) -> list[Held]:
        """The values that this rank keeps, as 1-D views."""
        return [(p, p.data.reshape(-1), 0, p.size) for p in self.parameters]

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        """Which elements of which parameters this rank's optimizer has state for."""
        return [(p, 0, p.size) for p in self.parameters if p.requires_grad]

    def updated(self) -> None:
        """The values were changed from outside."""
        for flat in self.flats:
            flat.updated()

    def local_arrays(self) -> list[Array]:
        """The flat values that this rank holds."""
        return [flat.data for flat in self.flats]

    def sizes(self) -> AxisSizes:
        """What its volumes follow from."""
        buckets = [bucket.slice.stop - bucket.slice.start for reducer in self.reducers for bucket in reducer.buckets]
        trainable = {p.name: p.size for p in self.parameters if p.requires_grad}
        return AxisSizes(
            self.stage,
            self.experts,
            [flat.padded_numel for flat in self.flats],
            buckets,
            trainable,
            len(self.weights()),
        )


def gradient_of(parameter: Parameter) -> Array:
    """Zeros when there is none."""
    gradient = parameter.grad
    return np.zeros(parameter.shape, parameter.dtype) if gradient is None else gradient
