"""The strategy of the reference: the whole model and optimizer on one device, and no message.

It catches every gradient contribution before anything is added, and then adds them in the order that the layout
declares. It shares with the strategies the engine and the optimizer, and none of their code that accumulates or sends.

Proved by: tests/equality/test_equality.py
"""

from collections.abc import Iterable, Sequence

import numpy as np

from minidist.core.autograd import Parameter, contribution_recorder
from minidist.core.base.arrays import Array
from minidist.core.nn import Module
from minidist.core.nn.flat import FlatParameters
from minidist.core.train.task import ordered_sum
from minidist.job.config.pipeline_plan import cut_stages, make_plan
from minidist.job.equality.bucket_sums import BucketSums
from minidist.job.equality.gradient_order import Add
from minidist.job.train.evaluate import evaluations
from minidist.job.train.job import Job, make_optimizer
from minidist.job.train.strategies.data_axis import DataAxis, Tensors, gradient_of
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.sharded import unit_parameters
from minidist.optim import block_square_sums
from minidist.techniques import wrapper_options

Contributions = dict[Parameter, list[Array]]


class OneDevice(MeshStrategy):
    """The whole model; each step runs the micro-batches `numbers` (None: all of them) one after the other.

    add: sums a parameter's contributions. factor: what the sum is multiplied by. Where a technique sums the
    replicas' buckets, it does so here, too.
    """

    def __init__(self, job: Job, add: Add, numbers: Iterable[int] | None = None, factor: float = 1) -> None:
        self.flat = FlatParameters(job.model.parameters())
        super().__init__(job, None, [DataAxis([self.flat], make_optimizer(job, self.flat), model=job.model)])
        self.add, self.factor = add, factor
        self.some = None if numbers is None else list(numbers)
        # A pipeline without other replicas has no reduction that a technique could do.
        reduces = job.config.pp == 1 or job.batches.dp > 1 or job.config.zero
        self.technique = next((each for each in job.extensions if each.sums_buckets), None)
        self.sums = BucketSums(job, self.technique) if self.technique is not None and reduces else None

    def _numbers(self, job: Job) -> Iterable[int]:
        shares = job.batch.shares
        return range(len(shares.rows) * shares.accumulation) if self.some is None else self.some

    def forward_backward(self, step: int) -> list[float]:
        # Catch the contributions of all micro-batches: nothing is added while backward runs.
        caught = [one_micro_batch(self.job, step, number) for number in self._numbers(self.job)]

        # Now add them, parameter by parameter.
        self.zero_grad()
        sites = {p.name: [contributions.get(p, []) for _, contributions in caught] for p in self.flat.parameters}
        totals = None if self.sums is None else self.sums.add(sites)
        for parameter in self.flat.parameters:
            name = parameter.name
            total = self.add(name, sites[name]) if totals is None else totals.get(name)
            if total is not None:
                # In the dtype of the gradient, so that the product has the same bits as on a rank.
                parameter.grad = total if self.factor == 1 else total * total.dtype.type(self.factor)
        return [loss for loss, _ in caught]

    def held_out_losses(self, job: Job) -> list[float]:
        return [job.loss_at(0, number).item() for number in self._numbers(job)]

    def square_sums(self) -> Array:
        """Return the block sums in the order of the units that the layout shards (see optim/clip.py)."""
        units = [np.concatenate([gradient_of(p).reshape(-1) for p in unit]) for unit in self._clip_units()]
        return np.concatenate([block_square_sums(unit) for unit in units])

    def _stages(self) -> tuple[list[Module], list[str]]:
        """Return the modules of the pipeline's stages, or the model, and the names that several stages share."""
        config, model = self.job.config, self.job.model
        if config.pp == 1:
            return [model], []
        return cut_stages(config, model, make_plan(config, self.job.batches.accumulation).stages)

    def _clip_units(self) -> list[list[Parameter]]:
        """Return the parameters whose gradients lie one after the other where the layout takes the norm."""
        config = self.job.config
        stages, tied = self._stages()
        units = []
        for number, module in enumerate(stages):
            parts = [list(module.parameters())]
            if config.zero == 3:
                threshold = wrapper_options(config).get("persistence_threshold", 0)
                parts = unit_parameters(module, threshold, tied)
            elif config.zero == 2 or self.technique is not None:
                parts = [[p for p in parts[0] if p.name not in tied], [p for p in parts[0] if p.name in tied]]
            # A tied weight counts on the first stage.
            units += [[p for p in part if number == 0 or p.name not in tied] for part in parts]
        return [unit for unit in units if unit]

    def tensors(self) -> Tensors:
        (axis,) = self.data_axes
        return axis.tensors()


def one_micro_batch(job: Job, step: int, number: int) -> tuple[float, Contributions]:
    """Return a micro-batch's loss, and each use's contribution to the gradient of its parameter, computed whole."""
    caught: Contributions = {}
    # Backward gives each contribution to the recorder in place of adding it.
    token = contribution_recorder.set(lambda parameter, array: caught.setdefault(parameter, []).append(array))
    try:
        batch = job.micro_batch(step, number)
        with job.coordinates(step, number):
            loss = job.loss(*batch)
            job.scaled(loss).backward()
    finally:
        contribution_recorder.reset(token)
    return loss.item(), caught


def evaluate_devices(devices: Sequence[MeshStrategy], done: int) -> dict[str, float]:
    """Return the held-out losses after `done` steps by name, if there are any. Devices share the micro-batches."""
    every = devices[0].job.config.evaluate_every
    if not every or done % every:
        return {}

    def loss() -> float:
        losses = []
        for device in devices:
            with device.job.evaluating() as held_out:
                losses += device.held_out_losses(held_out)
        return ordered_sum(losses)

    return evaluations(devices[0].job, done, loss)
