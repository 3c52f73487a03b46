"""Our solutions of the assignments of cs336; they are not a part of the package."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.collectives import all_gather, broadcast, reduce_scatter
from minidist.core.comm import Comm
from minidist.core.nn import MLP
from minidist.core.optim import AdamW
from minidist.course.lesson.assignments.cs336 import use_ddp, use_fsdp, use_sharded_optimizer
from minidist.parallel.data_parallel import DistributedDataParallel


class CountedAdamW(AdamW):
    """AdamW that counts the elements it is given on this rank."""

    def __init__(
        self, parameters: Iterable[Parameter], counter: list[int], **settings: Any
    ) -> None:
        owned = list(parameters)
        counter[0] += sum(parameter.data.size for parameter in owned)
        super().__init__(owned, **settings)


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
            value = np.ascontiguousarray(parameter.data)
            broadcast(self.comm, value, root=owner)
            parameter.data[...] = value

    def zero_grad(self) -> None:
        """Forget all gradients, those of other ranks' parameters too."""
        for parameter in self.params:
            parameter.grad = None


class FullySharded:
    """The module's parameters as one array, of which each rank has a part: Psi to gather, Psi to reduce per step."""

    def __init__(self, module: MLP, comm: Comm) -> None:
        self.module, self.comm = module, comm
        flat = np.concatenate([parameter.data.reshape(-1) for parameter in module.parameters()])
        broadcast(comm, flat)
        self.counts = chunk_sizes(flat.size, comm.size)
        first = offsets(self.counts)[comm.rank]
        self.shard = Parameter(flat[first : first + self.counts[comm.rank]].copy())

    def parameters(self) -> list[Parameter]:
        """Return this rank's shard."""
        return [self.shard]

    def gathered(self) -> dict[str, np.ndarray]:
        """Return the whole parameters by name."""
        flat = np.asarray(all_gather(self.comm, self.shard.data, counts=self.counts)).reshape(-1)
        whole, start = {}, 0
        for name, parameter in self.module.named_parameters():
            size = int(np.prod(parameter.shape))
            whole[name] = flat[start : start + size].reshape(parameter.shape)
            start += size
        return whole

    def __call__(self, x: np.ndarray) -> Any:
        for parameter, value in zip(
            self.module.parameters(), self.gathered().values(), strict=True
        ):
            parameter.data = value
        return self.module(x)

    def reduce(self) -> None:
        """Reduce-scatter the gradients into the shard."""
        flat = np.concatenate(
            [np.asarray(parameter.grad).reshape(-1) for parameter in self.module.parameters()]
        )
        self.module.zero_grad()
        self.shard.grad = reduce_scatter(self.comm, flat, counts=self.counts) / self.comm.size


def _fsdp_solution(comm: Comm, model: MLP, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Train with one flat array, cut among the ranks."""
    functions = {
        "get_fsdp": FullySharded,
        "fsdp_on_after_backward": lambda model, optimizer: model.reduce(),
        "fsdp_gather_full_params": FullySharded.gathered,
    }
    return use_fsdp(functions)(comm, model, rows)


def _ddp_solution(comm: Comm, model: MLP, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Train with DistributedDataParallel."""
    functions = {
        "get_ddp": DistributedDataParallel,
        "ddp_on_after_backward": lambda model, optimizer: None,
    }
    return use_ddp(functions)(comm, model, rows)


def _sharded_solution(comm: Comm, model: MLP, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Train with an owner for each parameter."""
    return use_sharded_optimizer({"get_sharded_optimizer": ShardedOptimizer})(comm, model, rows)


SOLUTIONS = {
    "cs336.ddp": _ddp_solution,
    "cs336.ddp_tied": _ddp_solution,
    "cs336.sharded_optimizer": _sharded_solution,
    "cs336.fsdp": _fsdp_solution,
}
