"""Pipelines as a strategy of the training loop: this rank's stages, their optimizers, and what must be sent.

    ranks = pp x dp, the data axis fastest:      pp 0   0  1        mesh["pp"] of rank 3 is {1, 3}: its pipeline
                                                 pp 1   2  3        mesh["dp"] of rank 3 is {2, 3}: the same stages
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minidist.base.arrays import Array
from minidist.base.errors import UsageError
from minidist.base.random import batch_coordinates
from minidist.base.trace import purpose
from minidist.collectives import closed_form
from minidist.comm import Comm
from minidist.comm.mesh import init_device_mesh
from minidist.optim import NORM_BLOCK
from minidist.pipeline.plan import Plan, parts, unpack
from minidist.pipeline.runtime import Pipeline, cut_model, split_model
from minidist.pipeline.runtime.shapes import WORDS
from minidist.pipeline.runtime.shared import ROW
from minidist.train.config import Batches, TrainConfig
from minidist.train.job import Job, as_input, build, make_optimizer
from minidist.train.plans import make_plan
from minidist.train.strategies import OneDevice, Tensors


def check_pipeline(config: TrainConfig, batches: Batches) -> None:
    """Raise UsageError when the pipeline cannot be built; said once, before any rank starts."""
    if config.pp == 1:
        if config.chunks:
            raise UsageError("--chunks belongs to a pipeline; add --pp 2 or more")
        return
    if config.recompute == "selective":
        raise UsageError(f"--recompute selective does not combine with --pp {config.pp} yet; take --recompute full")
    if config.offload != "none":
        raise UsageError(f"--offload {config.offload} does not combine with --pp {config.pp} yet; leave it out")
    if config.save:
        raise UsageError(f"--save does not combine with --pp {config.pp} yet; leave it out")
    if config.zero:
        raise UsageError(f"--zero {config.zero} does not combine with --pp {config.pp} yet; take --zero 0")
    if config.synchronize_each:
        raise UsageError("--synchronize-each has no meaning in a pipeline, which reduces a stage's gradients once; leave it out")
    cut_model(build(config, batches).model, make_plan(config, batches.accumulation).stages)


class StageOptimizers:
    """One optimizer for each stage, used as one."""

    def __init__(self, job: Job, flats: Sequence[Any]) -> None:
        self.each = [make_optimizer(job, flat) for flat in flats if len(flat)]
        self.lr_factor = 1.0

    def step(self) -> None:
        """Update every stage."""
        for optimizer in self.each:
            optimizer.lr_factor = self.lr_factor
            optimizer.step()

    @property
    def step_count(self) -> int:
        """Steps so far."""
        return self.each[0].step_count

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        """Parameter name -> state arrays; of a shared parameter's copies, which are equal, the first."""
        result: dict[str, dict[str, Array]] = {}
        for optimizer in self.each:
            for name, arrays in optimizer.state.items():
                result.setdefault(name, arrays)
        return result


class PipelineParallel(OneDevice):
    """This rank's stages in a pipeline of `config.pp` ranks; replicas of the pipeline on the data axis."""

    def __init__(self, job: Job, comm: Comm) -> None:
        config, batches = job.config, job.batches
        mesh = init_device_mesh(comm, (config.pp, batches.dp), ("pp", "dp"))
        self.job, self.comm, self.data = job, mesh["pp"], mesh["dp"]
        plan = make_plan(config, batches.accumulation)
        self.stages, tied = split_model(job.model, plan.stages, plan.stages_of(self.comm.rank))
        self.now = 0
        self.pipe = Pipeline(
            self.comm, plan, self.stages, self._loss, tied=tied, data=self.data, reduction=config.reduction,
            coordinates=lambda i: batch_coordinates(self.now, self._first(i), config.seed),
        )  # fmt: skip
        self.optimizer = StageOptimizers(job, self.pipe.flats)  # type: ignore[assignment]

    def _first(self, i: int) -> int:
        """Global number of the first sample of micro-batch i of this replica."""
        return (self.data.rank * self.job.batches.accumulation + i) * self.job.batches.micro_batch

    def _loss(self, outputs: Any, targets: Any) -> Any:
        return self.job.loss_of(outputs, targets)

    def run(self, step: int) -> list[float]:
        """Forward and backward of this replica's micro-batches; their losses."""
        self.now = step
        size = self.job.batches.micro_batch
        samples = [self.job.sampler.batch(step, self._first(i), size) for i in range(self.job.batches.accumulation)]
        inputs = [getattr(x := as_input(inputs, self.job.dtype), "data", x) if inputs.dtype.kind == "f" else inputs for inputs, _ in samples]
        return self.pipe.step(inputs, [targets for _, targets in samples])

    def zero_grad(self) -> None:
        self.pipe.zero_grad()

    def clip(self, max_norm: float) -> float:
        return self.pipe.clip_grad_norm_(max_norm)

    def tensors(self) -> Tensors:
        """Everything of all stages, on every rank of the pipeline (purpose checkpoint)."""
        mine: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for flat in self.pipe.flats:
            for p in flat.parameters:
                mine["weights"].setdefault(p.name, np.array(p.data))
                if p.requires_grad:
                    gradient = np.zeros(p.shape, p.dtype) if p.grad is None else np.array(p.grad)
                    mine["gradients"].setdefault(p.name, gradient)
        for name, arrays in self.optimizer.state.items():
            mine["optimizer"].update({f"{name}.{key}": np.array(array) for key, array in arrays.items()})
        everybody: Tensors = {kind: {} for kind in mine}
        with purpose("checkpoint"):
            for rank in range(self.comm.size):
                for other in range(self.comm.size):
                    if self.comm.rank == rank != other:
                        self.comm.send_object(mine, other)
                theirs = mine if rank == self.comm.rank else self.comm.recv_object(rank)
                for kind, table in theirs.items():
                    for name, array in table.items():
                        everybody[kind].setdefault(name, array)
        return everybody

    def local_arrays(self) -> dict[str, Array]:
        return {f"stage {stage.number}": stage.flat.data for stage in self.stages}

    def unit_sizes(self) -> list[int]:
        return [flat.padded_numel for flat in self.pipe.flats]

    def bucket_sizes(self) -> list[int]:
        return [bucket.slice.stop - bucket.slice.start for reducer in self.pipe.reducers.values() for bucket in reducer.buckets]


class PipelineOrder:
    """In which order a pipeline adds the contributions to a parameter: data for the reference."""

    def __init__(self, job: Job) -> None:
        plan = make_plan(job.config, job.batches.accumulation)
        modules, self.tied = cut_model(job.model, plan.stages)
        self.replicas, self.additions, self.last = job.batches.dp, plan.additions(), plan.stages - 1
        self.stage_of = {p.name: stage for stage, module in reversed(list(enumerate(modules))) for p in module.parameters()}

    def sites(self, name: str) -> list[tuple[int, slice]]:
        """(stage, which of a micro-batch's contributions): backward meets the head's use of tied weights first."""
        if name in self.tied:
            return [(0, slice(1, None)), (self.last, slice(0, 1))]
        return [(self.stage_of[name], slice(None))]


# --- what must be sent ------------------------------------------------------------------------------------------------


def pipeline_volumes(config: TrainConfig, batches: Batches, bucket_sizes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Payload bytes of all ranks in a job of `config.steps` steps, by purpose. bucket_sizes: of each world rank."""
    job = build(config, batches)
    plan = make_plan(config, batches.accumulation)
    p, n, m, steps = config.pp, batches.dp, batches.accumulation, config.steps
    itemsize = np.dtype(job.dtype).itemsize
    modules, tied = cut_model(job.model, plan.stages)
    sizes = [{q.name: q.size for q in module.parameters() if q.requires_grad} for module in modules]
    holders = plan.holders()
    crossings, paths = _crossings(plan)
    samples = batches.micro_batch * (config.context if config.model == "gpt" else 1)
    border = crossings * samples * config.width * itemsize
    rows = sum(len(sizes[stage]) * len(ranks) for stage, ranks in holders.items())

    def all_reduce(size: int) -> int:
        return sum(closed_form.all_reduce(size, p, rank)[1] for rank in range(p)) * 8

    tied_bytes, shared_bytes = 0, 0
    for stage, ranks in holders.items():
        others = len(ranks) - 1
        shared_bytes += len(ranks) * others * sum(size for name, size in sizes[stage].items() if name not in tied) * itemsize
    for name in tied:
        sites = [(stage, rank) for stage, ranks in holders.items() if name in sizes[stage] for rank in ranks]
        tied_bytes += len(sites) * (len({rank for _, rank in sites}) - 1) * sizes[0][name] * itemsize
    reduced = sum(closed_form.all_reduce(size, n, rank % n)[1] for rank, row in enumerate(bucket_sizes) for size in row) * itemsize
    blocks = 0
    for stage, ranks in holders.items():
        for at in range(len(ranks)):
            own = sum(size for name, size in sizes[stage].items() if at == 0 and (stage == 0 or name not in tied))
            blocks += -(-own // NORM_BLOCK)
    places = sum(len(ranks) for ranks in holders.values())
    digest = 16
    volumes = {
        "startup": n * (closed_form.broadcast(digest, p, 0)[1] + p * (p - 1) * 8 + (p - 1) * rows * ROW * 8 + paths * WORDS * 8),
        "pipeline_activation": steps * n * border,
        "pipeline_gradient": steps * n * border,
        "tied": steps * n * tied_bytes,
        "gradient_reduce": steps * (n * shared_bytes + reduced),
        "clip_norm": steps * n * (all_reduce(places) + all_reduce(blocks)) if config.clip is not None else 0,
        "metrics": steps * (n * all_reduce(m) + p * n * (n - 1) * m * 8),
    }
    return {name: volume for name, volume in volumes.items() if volume}


def _crossings(plan: Plan) -> tuple[int, int]:
    """Activations of a step that go from rank to rank, and borders between ranks on all distinct ways through the ranks."""
    home = {}
    for rank, order in enumerate(plan.orders):
        for action in (unpack(part) for item in order for part in parts(item)):
            if action.kind == "F":
                home[action.stage, action.microbatch] = rank
    ways = [tuple(home[stage, i] for stage in range(plan.stages)) for i in range(plan.microbatches)]

    def borders(way: tuple[int, ...]) -> int:
        return sum(a != b for a, b in pairwise(way))

    return sum(map(borders, ways)), sum(map(borders, set(ways)))
