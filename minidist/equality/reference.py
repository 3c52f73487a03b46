"""Training on one device, written to be obviously right: what every strategy must equal, bit for bit where it claims
to.

It runs the same micro-batches one after the other, catches every gradient contribution (one for each use of a parameter
in each micro-batch, computed whole) before anything is added, and then adds them in the order that the layout declares.
It shares with the strategies the engine and the optimizer, and none of their code that accumulates or sends.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from minidist.autograd import Parameter, Tensor, concatenate, contribution_recorder
from minidist.base import arrays as xp
from minidist.base.arrays import Array
from minidist.base.layout import GradientOrder
from minidist.config.train_config import Batches, TrainConfig, updates_of
from minidist.parallel.context import part_order, sequence_positions
from minidist.train.evaluate import evaluate_alone
from minidist.train.job import Job, build
from minidist.train.strategies.base import OneDevice
from minidist.train.strategies.pipelines import PipelineOrder
from minidist.train.trainer import Observer, StepState, finish_step

Contributions = dict[Parameter, list[Array]]


def reduces_each(config: TrainConfig) -> bool:
    """Is every micro-batch summed over the ranks before it is added to those before it?"""
    return config.synchronize_each or config.zero >= 2


def declared_order(config: TrainConfig, batches: Batches) -> GradientOrder:
    """The order in which the layout of `config` adds contributions."""
    groups = config.dp_replicate if config.zero == 3 else 1
    return GradientOrder(batches.dp, (tuple(range(batches.accumulation)),), reduces_each(config), groups)


def reference(config: TrainConfig, batches: Batches, observers: Sequence[Observer] = ()) -> list[float]:
    """Train on one device as `batches` would be trained on many; returns the losses. Sends nothing.

    The recipe is not applied: no tiles, no parts of sequences, no shards, nothing recomputed or on the host. An
    asynchronous pipeline is replayed with its delays (replay.py).
    """
    if config.pp > 1 and updates_of(config.schedule) != "flush":
        from minidist.equality.delayed_replay import replay

        return replay(config, batches, observers)
    job, order = build(config, batches), declared_order(config, batches)
    route_in_groups(job)
    device = OneDevice(job)
    losses = []
    with xp.quiet_overflow():
        for step in range(config.steps):
            loss, contributions = 0.0, []
            for number in range(batches.microbatches):
                value, caught = one_micro_batch(job, step, number)
                loss += value
                contributions.append(caught)
            _add(device, contributions, order if config.pp == 1 else None)
            losses.append(loss)
            finish_step(job, device, step, loss)
            for observer in observers:
                observer(StepState(0, step, loss, job, device, evaluate_alone([job], step + 1)))
    return losses


def route_in_groups(job: Job) -> None:
    """With context parallelism the tokens of a rank are a group of their own, with its own capacity and balancing loss."""
    config, cp = job.config, job.batches.dims.cp
    if cp > 1 and config.experts:
        groups = [sequence_positions(config.context, rank, cp, part_order(config.attention)) for rank in range(cp)]
        for block in job.model.transformer.h:
            block.mlp.forward = partial(_routed, block.mlp, block.mlp.forward, groups)


def _routed(mixture: Any, forward: Any, groups: list[Array], x: Tensor) -> Tensor:
    outputs, auxiliary = [], []
    for group in groups:
        outputs.append(forward(x[:, group]))
        auxiliary.append(mixture.auxiliary_loss * (len(group) / x.shape[1]))
    mixture.auxiliary_loss = sum(auxiliary[1:], start=auxiliary[0])
    return concatenate(outputs, axis=1)[:, xp.concatenate(groups).argsort()]


def one_micro_batch(job: Job, step: int, number: int) -> tuple[float, Contributions]:
    """Its loss, and what every use of a parameter contributes to that parameter's gradient, each computed whole."""
    caught: Contributions = {}
    token = contribution_recorder.set(lambda parameter, array: caught.setdefault(parameter, []).append(array))
    try:
        with job.coordinates(step, number):
            loss = job.loss(step, number)
            job.scaled(loss).backward()
    finally:
        contribution_recorder.reset(token)
    return loss.item(), caught


def _add(device: OneDevice, contributions: list[Contributions], order: GradientOrder | None) -> None:
    """`order`: None for a pipeline, whose plan declares an order for each stage."""
    device.flat.zero_grad()
    pipeline = PipelineOrder(device.job) if order is None else None
    for parameter in device.flat.parameters:
        sites = [c.get(parameter, []) for c in contributions]
        if order is not None:
            total = add_in_order(sites, order)
        else:
            assert pipeline is not None
            total = _add_stages(sites, pipeline, parameter.name)
        if total is not None:
            parameter.grad = total


def _add_stages(contributions: Sequence[list[Array]], order: PipelineOrder, name: str) -> Array | None:
    """Micro-batches as the plan has them, then the ranks of a stage, then the stages, then the replicas; with ZeRO 2
    and 3 the replicas first, in every micro-batch.
    """
    local = len(contributions) // order.replicas

    def of_stage(stage: int, sites: slice, replica: int) -> Array | None:
        return _fold(
            _fold(site for i in numbers for site in contributions[replica * local + i][sites])
            for numbers in order.additions[stage]
        )

    def of_stage_in_each(stage: int, sites: slice) -> Array | None:
        def of_micro_batch(i: int) -> Array | None:
            return _fold_replicas(
                lambda replica: _fold(contributions[replica * local + i][sites]), order.replicas, order.groups
            )

        return _fold(_fold(of_micro_batch(i) for i in numbers) for numbers in order.additions[stage])

    if order.each:
        return _fold(of_stage_in_each(stage, sites) for stage, sites in order.sites(name))
    return _fold(
        _fold(of_stage(stage, sites, replica) for stage, sites in order.sites(name))
        for replica in range(order.replicas)
    )


def add_in_order(contributions: Sequence[list[Array]], order: GradientOrder) -> Array | None:
    """Add contributions[micro-batch number] (each a list of sites in backward order) as `order` declares; None if none."""
    local = len(contributions) // order.replicas
    (sequence,) = order.microbatches  # one stage

    def over_replicas(of_one: Callable[[int], Array | None]) -> Array | None:
        return _fold_replicas(of_one, order.replicas, order.groups)

    if order.synchronize_each:
        # type: ignore[misc]
        return _fold(over_replicas(lambda replica, i=i: _fold(contributions[replica * local + i])) for i in sequence)
    return over_replicas(lambda replica: _fold(site for i in sequence for site in contributions[replica * local + i]))


def _fold_replicas(of_one: Callable[[int], Array | None], replicas: int, groups: int) -> Array | None:
    """The replicas in rank order, inside so many groups of neighbours, then the groups (hybrid sharding)."""
    group = replicas // groups
    return _fold(_fold(of_one(first + replica) for replica in range(group)) for first in range(0, replicas, group))


def _fold(parts: Iterable[Array | None]) -> Array | None:
    """((a + b) + c) + ..., leaving out what is None."""
    total: Array | None = None
    for part in parts:
        if part is not None:
            total = xp.array(part) if total is None else total + part
    return total
