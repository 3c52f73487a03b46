"""Our solutions of the assignments of cs336; they are not a part of the package."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives import all_gather, broadcast, reduce_scatter
from minidist.core.comm import Comm
from minidist.core.nn import Module
from minidist.course.lesson.assignments.cs336 import use_ddp, use_fsdp, use_sharded_optimizer
from minidist.parallel.data_parallel import DistributedDataParallel


class ShardedOptimizer:
    """Each parameter has an owner, which steps it and broadcasts it: Psi elements leave the owners per step."""

    def __init__(
        self, params: Iterable[Parameter], optimizer_cls: Any, comm: Comm, **settings: Any
    ) -> None:
        self.params, self.comm = list(params), comm
        held = [0] * comm.size
        self.owners = []
        for parameter in self.params:  # to the rank that has the least
            owner = held.index(min(held))
            held[owner] += parameter.data.size
            self.owners.append(owner)
        mine = [p for p, owner in zip(self.params, self.owners, strict=True) if owner == comm.rank]
        self.inner = optimizer_cls(mine, **settings) if mine else None

    def step(self) -> None:
        """Step this rank's parameters, then fetch the others."""
        if self.inner is not None:
            self.inner.step()
        for parameter, owner in zip(self.params, self.owners, strict=True):
            if not parameter.requires_grad:
                continue
            value = np.ascontiguousarray(parameter.data)
            broadcast(self.comm, value, root=owner)
            parameter.data[...] = value

    def zero_grad(self) -> None:
        """Forget all gradients, those of other ranks' parameters too."""
        for parameter in self.params:
            parameter.grad = None


class FullySharded:
    """Each parameter is cut into one part per rank: its elements are gathered, and their gradients reduced, per step.

    compute_dtype: in which they travel and are multiplied; the shards, and their gradients, stay as they are.
    """

    def __init__(self, module: Module, comm: Comm, compute_dtype: Any = None) -> None:
        self.module, self.comm, self.dtype = module, comm, compute_dtype
        self.named = list(module.named_parameters())
        self.shards = []
        for _, parameter in self.named:
            flat = parameter.data.reshape(-1).copy()
            broadcast(comm, flat)
            counts = chunk_sizes(flat.size, comm.size)
            first = offsets(counts)[comm.rank]
            own = flat[first : first + counts[comm.rank]].copy()
            self.shards.append(Parameter(own, requires_grad=parameter.requires_grad))

    def parameters(self) -> list[Parameter]:
        """Return this rank's shards."""
        return self.shards

    def gathered(self, dtype: Any = None) -> dict[str, np.ndarray]:
        """Return the whole parameters by name."""
        whole = {}
        for (name, parameter), shard in zip(self.named, self.shards, strict=True):
            counts = chunk_sizes(int(np.prod(parameter.shape)), self.comm.size)
            own = shard.data if dtype is None else shard.data.astype(dtype)
            gathered = np.asarray(all_gather(self.comm, own, counts=counts))
            whole[name] = gathered.reshape(parameter.shape)
        return whole

    def __call__(self, x: np.ndarray) -> Any:
        for (_, parameter), value in zip(
            self.named, self.gathered(self.dtype).values(), strict=True
        ):
            parameter.data = value
        return self.module(x if self.dtype is None else x.astype(self.dtype))

    def reduce(self) -> None:
        """Reduce-scatter the gradients, each into its shard."""
        for (_, parameter), shard in zip(self.named, self.shards, strict=True):
            if parameter.grad is None:
                continue
            flat = np.asarray(parameter.grad).reshape(-1)
            counts = chunk_sizes(flat.size, self.comm.size)
            mine = reduce_scatter(self.comm, flat, counts=counts)
            shard.grad = mine.astype(shard.data.dtype) / self.comm.size
            parameter.grad = None


def _fsdp_solution(
    comm: Comm, model: Module, rows: Sequence[tuple[np.ndarray, np.ndarray]], dtype: Any
) -> Any:
    """Train with each parameter cut among the ranks."""
    functions = {
        "get_fsdp": FullySharded,
        "fsdp_on_after_backward": lambda model, optimizer: model.reduce(),
        "fsdp_gather_full_params": FullySharded.gathered,
    }
    return use_fsdp(functions)(comm, model, rows, dtype)


def _ddp_solution(comm: Comm, model: Module, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Train with DistributedDataParallel."""
    functions = {
        "get_ddp": DistributedDataParallel,
        "ddp_on_after_backward": lambda model, optimizer: None,
    }
    return use_ddp(functions)(comm, model, rows)


def _sharded_solution(
    comm: Comm, model: Module, rows: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Any:
    """Train with an owner for each parameter."""
    return use_sharded_optimizer({"get_sharded_optimizer": ShardedOptimizer})(comm, model, rows)


SOLUTIONS = {
    "cs336.ddp": _ddp_solution,
    "cs336.ddp_tied": _ddp_solution,
    "cs336.sharded_optimizer": _sharded_solution,
    "cs336.fsdp": _fsdp_solution,
    "cs336.fsdp_fp16": _fsdp_solution,
}
