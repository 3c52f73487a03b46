"""What the training loop asks of a strategy, and its answers: one device, data parallel, ZeRO 1 and 2, ZeRO 3.

    model(...)        the forward pass; a plain loss.backward() then communicates what the strategy communicates
    no_sync()         around a micro-batch whose gradients are not to travel yet
    zero_grad, clip, step
    tensors()         gradients, weights and optimizer state, whole and by name, whatever is sharded
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from minidist.autograd import Parameter
from minidist.base.arrays import Array
from minidist.comm import Comm
from minidist.nn import Module
from minidist.nn.flat import FlatParameters
from minidist.optim import Optimizer, block_square_sums, clip_coefficient, norm_from_blocks, scale_gradients_
from minidist.parallel import (
    DistributedDataParallel,
    ZeroOptimizer,
    clip_shards_,
    fully_shard,
    gather_tensors,
    sharded_parameters,
    shards_of,
)
from minidist.pipeline.runtime import cut_model
from minidist.train.job import Job, make_optimizer, optimizer_class
from minidist.train.plans import make_plan

Tensors = dict[str, dict[str, Array]]  # "gradients", "weights", "optimizer" -> name -> values


def shard_modules(model: Module) -> list[Module]:
    """The modules that ZeRO 3 shards as units, bottom up: the blocks (layers of an MLP), then what is left of the model."""
    layers: list[Module] = model.transformer.h if hasattr(model, "transformer") else model.layers  # type: ignore[attr-defined]
    return [*layers, model]


def unit_parameters(model: Module) -> list[list[Parameter]]:
    """The parameters of each of these units, the model's own first; a parameter belongs to the first module that has it."""
    units: list[list[Parameter]] = []
    seen: set[Parameter] = set()
    for module in shard_modules(model):
        units.append([p for p in module.parameters() if p not in seen])
        seen.update(units[-1])
    return [unit for unit in (units[-1], *units[:-1]) if unit]


def stage_parameters(job: Job) -> list[list[Parameter]]:
    """The parameters of each stage of a pipeline, in stage order; a tied one belongs to the first stage that has it."""
    modules, tied = cut_model(job.model, make_plan(job.config, job.batches.accumulation).stages)
    return [[p for p in module.parameters() if number == 0 or p.name not in tied] for number, module in enumerate(modules)]


class OneDevice:
    """The whole model and optimizer on this rank, and no message; the base of the others."""

    model: Any
    optimizer: Optimizer

    def __init__(self, job: Job) -> None:
        self.job = job
        self.flat = FlatParameters(job.model.parameters())
        self.model = job.model
        self.optimizer = make_optimizer(job, self.flat)

    def no_sync(self) -> AbstractContextManager[None]:
        """The gradients of a pass in the block stay on this rank."""
        return nullcontext()

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self.flat.zero_grad()

    def clip(self, max_norm: float) -> float:
        """Clip by the global norm, its blocks in the order of the units that are sharded (see optim/clip.py)."""
        units = self.clip_units()
        norm = norm_from_blocks(np.concatenate([block_square_sums(np.concatenate([_gradient(p).reshape(-1) for p in unit])) for unit in units]))
        scale_gradients_(self.flat, clip_coefficient(norm, max_norm))
        return norm

    def clip_units(self) -> list[list[Parameter]]:
        """Parameters whose gradients lie one after the other where the strategy takes the norm."""
        if self.job.config.zero == 3:
            return unit_parameters(self.job.model)
        if self.job.config.pp > 1:
            return stage_parameters(self.job)
        return [self.flat.parameters]

    def step(self) -> None:
        """The optimizer's step, and whatever makes every rank's parameters new."""
        self.optimizer.step()

    def tensors(self) -> Tensors:
        """Copies of gradients, weights and optimizer state by name. Every rank calls it: shards are gathered."""
        state = self.optimizer.state
        return {
            "gradients": {p.name: np.array(_gradient(p)) for p in self.flat.parameters if p.requires_grad},
            "weights": {p.name: np.array(p.data) for p in self.flat.parameters},
            "optimizer": {f"{name}.{key}": np.array(array) for name, arrays in state.items() for key, array in arrays.items()},
        }

    # For checkpoints: which elements of which parameters this rank keeps, as (parameter, ..., start, stop).
    replicated_weights = True  # does every rank keep the same ones?
    replicated_state = True

    def weights(self) -> list[tuple[Parameter, Array, int, int]]:
        """The values, as 1-D views."""
        return [(p, p.data.reshape(-1), 0, p.size) for p in self.flat.parameters]

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        """Where the optimizer has state."""
        return [(p, 0, p.size) for p in self.flat.parameters if p.requires_grad]

    def updated(self) -> None:
        """The values were changed from outside."""
        self.flat.updated()

    def local_arrays(self) -> dict[str, Array]:
        """The values that this rank holds, by name."""
        return {"parameters": self.flat.data}

    def unit_sizes(self) -> list[int]:
        """Elements, with padding, of each unit that is broadcast at the start."""
        return [self.flat.padded_numel]

    def bucket_sizes(self) -> list[int]:
        """Elements of each message of gradients."""
        return []


def _gradient(parameter: Parameter) -> Array:
    gradient = parameter.grad
    return np.zeros(parameter.shape, parameter.dtype) if gradient is None else gradient


class DataParallel(OneDevice):
    """Everything on every rank; gradients are all-reduced."""

    def __init__(self, job: Job, comm: Comm) -> None:
        super().__init__(job)
        config = job.config
        self.model = DistributedDataParallel(
            job.model, comm, reduction="sum", flat=self.flat, algorithm=config.reduction, bucket_cap_mb=config.bucket_cap_mb
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()  # type: ignore[no-any-return]

    def clip(self, max_norm: float) -> float:
        # One flat array is one unit, whatever the reference of another strategy would do.
        norm = norm_from_blocks(block_square_sums(self.flat.grad))
        scale_gradients_(self.flat, clip_coefficient(norm, max_norm))
        return norm

    def bucket_sizes(self) -> list[int]:
        return [bucket.slice.stop - bucket.slice.start for bucket in self.model.reducer.buckets]


class ShardedOptimizer(OneDevice):
    """ZeRO 1 and 2."""

    replicated_state = False

    def __init__(self, job: Job, comm: Comm) -> None:
        config = job.config
        kind, settings = optimizer_class(job)
        self.job, self.model = job, job.model
        self.zero = ZeroOptimizer(
            job.model, kind, comm=comm, stage=config.zero, reduction="sum", algorithm=config.reduction,
            reduce_bucket_size=config.reduce_bucket_size, **settings,
        )  # fmt: skip
        self.flat, self.optimizer = self.zero.flat, self.zero.optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        return self.zero.no_sync() if self.zero.stage == 1 else nullcontext()

    def zero_grad(self) -> None:
        self.zero.zero_grad()

    def clip(self, max_norm: float) -> float:
        return self.zero.clip_grad_norm_(max_norm)

    def step(self) -> None:
        self.zero.step()

    def tensors(self) -> Tensors:
        return self.zero.tensors()

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        return self.zero.shard.state_ranges()

    def bucket_sizes(self) -> list[int]:
        return [bucket.slice.stop - bucket.slice.start for bucket in self.zero.reducer.buckets]


class FullyShard(OneDevice):
    """ZeRO 3: every block is a unit, and what is left of the model is one."""

    replicated_weights = replicated_state = False

    def __init__(self, job: Job, comm: Comm) -> None:
        config = job.config
        self.job, self.model, self.comm = job, job.model, comm
        for module in shard_modules(job.model):
            fully_shard(module, mesh=comm, prefetch=config.prefetch, reduction="sum", algorithm=config.reduction)
        self.shards = shards_of(job.model)
        self.optimizer = make_optimizer(job, sharded_parameters(job.model))

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.zero_grad()

    def clip(self, max_norm: float) -> float:
        return clip_shards_(self.comm, self.shards, max_norm)

    def tensors(self) -> Tensors:
        return gather_tensors(self.shards, self.optimizer)

    def weights(self) -> list[tuple[Parameter, Array, int, int]]:
        return [(p, shard.data[place], start, stop) for shard in self.shards for p, place, start, stop in shard.ranges()]

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        return [held for shard in self.shards for held in shard.state_ranges()]

    def updated(self) -> None:
        for shard in self.shards:
            shard.updated()

    def local_arrays(self) -> dict[str, Array]:
        return {f"{i}": shard.data for i, shard in enumerate(self.shards)}

    def unit_sizes(self) -> list[int]:
        return [shard.flat.padded_numel for shard in self.shards]

    def bucket_sizes(self) -> list[int]:
        return self.unit_sizes()


def make_strategy(job: Job, comm: Comm) -> OneDevice:
    """The strategy that the config asks for."""
    match job.config.zero:
        case 0:
            return DataParallel(job, comm)
        case 1 | 2:
            return ShardedOptimizer(job, comm)
        case _:
            return FullyShard(job, comm)
