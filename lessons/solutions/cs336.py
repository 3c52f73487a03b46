"""Our answers to the assignment cs336, as a student hands them in: `minidist grade cs336.py --assignment cs336`."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from minidist.core.comm import Comm
from minidist.core.nn import Module


class Replicated:
    """Replicas that start as rank 0's, whose gradients are added up in one all-reduce: 2 (n-1)/n Psi per step."""

    def __init__(self, module: Module, comm: Comm) -> None:
        self.module, self.comm = module, comm
        self.params = list(module.parameters())
        values = np.concatenate([parameter.data.reshape(-1) for parameter in self.params])
        broadcast(comm, values)
        parts = np.split(values, np.cumsum([parameter.data.size for parameter in self.params]))
        for parameter, part in zip(self.params, parts[:-1], strict=True):
            parameter.data[...] = part.reshape(parameter.shape)

    def __call__(self, x: Any) -> Any:
        return self.module(x)

    def average(self) -> None:
        """Make each gradient the mean over the ranks."""
        trained = [parameter for parameter in self.params if parameter.grad is not None]
        total = all_reduce(
            self.comm, np.concatenate([np.asarray(p.grad).reshape(-1) for p in trained])
        )
        first = 0
        for parameter in trained:
            size = int(np.prod(parameter.shape))
            parameter.grad = (total[first : first + size] / self.comm.size).reshape(parameter.shape)
            first += size


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


def get_ddp(module: Module, comm: Comm) -> Replicated:
    """Return the module with replicas that start as rank 0's."""
    return Replicated(module, comm)


def ddp_on_after_backward(ddp_model: Replicated, optimizer: Any) -> None:
    """Average the gradients."""
    ddp_model.average()


def get_sharded_optimizer(
    params: Iterable[Parameter], optimizer_cls: Any, comm: Comm, **kwargs: Any
) -> ShardedOptimizer:
    """Return an optimizer; each rank has a part of its state."""
    return ShardedOptimizer(params, optimizer_cls, comm, **kwargs)


def get_fsdp(module: Module, comm: Comm, compute_dtype: Any) -> FullySharded:
    """Return the module with each parameter cut among the ranks."""
    return FullySharded(module, comm, compute_dtype)


def fsdp_on_after_backward(fsdp_model: FullySharded, optimizer: Any) -> None:
    """Leave the mean of the gradients in the shards."""
    fsdp_model.reduce()


def fsdp_gather_full_params(fsdp_model: FullySharded) -> dict[str, np.ndarray]:
    """Return the whole parameters by name."""
    return fsdp_model.gathered()
