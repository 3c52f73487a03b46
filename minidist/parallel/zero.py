"""`ZeroOptimizer` with options that are not the core's: unused and ignored parameters, hooks, clipping, whole layers.

Proved by: tests/parallel/test_zero.py, tests/parallel/test_unused_parameters.py
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import check_number
from minidist.core.autograd import Parameter
from minidist.core.base.arrays import is_half
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.module import Module
from minidist.core.parallel import zero
from minidist.core.parallel.data_parallel import Bucket, operation_of
from minidist.core.parallel.zero import REDUCE_BUCKET_SIZE
from minidist.optim import LayerwiseOptimizer, Muon
from minidist.optim.checks import check_optimizer_class
from minidist.optim.wrapper import OptimizerWrapper
from minidist.parallel.comm_hooks import register_comm_hook
from minidist.parallel.data_parallel import no_sync, not_copied
from minidist.parallel.layer_sums import LayerSums
from minidist.parallel.shards import clip_shards_
from minidist.parallel.unused import ZerosShardReducer
from minidist.parallel.whole_matrices import WholeMatrices


class ZeroOptimizer(OptimizerWrapper, zero.ZeroOptimizer):
    """Wraps an optimizer class so that each rank of `comm` holds the state, and steps the elements, of one shard.

        zero = ZeroOptimizer(model, AdamW, comm=comm, stage=2, lr=3e-3)
        model(batch).backward()      # gradients are reduced to their owners while this runs
        zero.step()                  # each rank steps its shard, then the parameters are gathered

    module: a module or some parameters. stage, reduce_bucket_size, reduction, algorithm: as in the core's class.
    find_unused_parameters: parameters without a gradient take part as zeros instead of raising; one that no rank has
    used is not stepped; costs one byte per parameter and pass.
    defaults: arguments of `optimizer_class`; LARS and LAMB get the norms of whole layers (`LayerSums` over `comm`; pass
    `layer_sums` where parameters are tensor-parallel, too), Muon whole matrices (`WholeMatrices`; pass `whole_matrices`
    likewise). Two of them are not the optimizer's: `alignment=1024`, shards begin at multiples of it, and clipping
    needs 1,024; `ignored_params=()`, neither broadcast nor summed nor stepped: you do it yourself. Of other parameters
    of the loss that no wrapper has, the first backward pass raises UsageError.

    Raises MismatchError when the ranks built different models, UsageError for an argument that neither takes.
    """

    def __init__(
        self,
        module: Module | Iterable[Parameter],
        optimizer_class: Any,
        *,
        comm: Comm,
        stage: int = 1,
        reduce_bucket_size: int = REDUCE_BUCKET_SIZE,
        reduction: str = "mean",
        algorithm: str = "ring",
        find_unused_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        if stage not in (1, 2):
            raise UsageError(f"ZeroOptimizer(stage={quoted(stage)}); the stage is 1 or 2, and stage 3 is fully_shard")
        operation_of(reduction)
        check_number("reduce_bucket_size", reduce_bucket_size, least=1)  # DeepSpeed's files write 5e8
        check_optimizer_class("ZeroOptimizer", optimizer_class, "model, {}, comm=comm")
        check_communicator(comm, "ZeroOptimizer")
        _check_arguments(optimizer_class, defaults)

        ignored = set(defaults.pop("ignored_params", ()))
        owner = module if isinstance(module, Module) else None
        parameters = [p for p in (module if owner is None else owner.parameters()) if p not in ignored]  # type: ignore[union-attr]
        if find_unused_parameters:
            self.reducer_type = ZerosShardReducer
        super().__init__(
            parameters,
            optimizer_class,
            comm=comm,
            stage=stage,
            reduce_bucket_size=reduce_bucket_size,
            reduction=reduction,
            algorithm=algorithm,
            module=owner,
            **{**_shard_arguments(optimizer_class, parameters, comm), **defaults},
        )
        self.reducer.guard.covers(owner, (*self.flat.parameters, *ignored))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied("ZeroOptimizer", self.comm)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Bucket], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket in place of the reduce-scatter."""
        register_comm_hook(self.reducer, state, hook)

    def no_sync(self) -> AbstractContextManager[None]:
        """Stage 1: backward passes in the block add to the local gradient; the next one outside reduces the total.

        Stage 2 has no local gradient to add to, so there it is an error.
        """
        if self.stage == 2:
            raise UsageError("no_sync with stage 2, which keeps no whole gradient between micro-batches; use stage=1")
        return no_sync(self.reducer)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip by the norm of the whole gradient (see `clip_shards_`); return the norm before.

        Gradients in half precision stay as they are, and the step scales them.
        """
        return clip_shards_(self.comm, [self.shard], max_norm, self.optimizer if is_half(self.flat.dtype) else None)


def _check_arguments(optimizer_class: Any, defaults: Mapping[str, Any]) -> None:
    """Raise UsageError for an argument that neither `ZeroOptimizer` nor the optimizer takes."""
    taken = inspect.signature(optimizer_class).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    own = inspect.signature(ZeroOptimizer).parameters
    known = [*list(own)[2:-1], "alignment", "ignored_params", *list(taken)[1:]]
    for name in defaults:
        if name not in known:
            raise UsageError(
                f"ZeroOptimizer has no argument {name!r}, and {optimizer_class.__name__} neither"
                f"{nearest(name, known)}; there are {', '.join(known)}"
            )


def _shard_arguments(optimizer_class: Any, parameters: list[Parameter], comm: Comm) -> dict[str, Any]:
    """Return what the optimizer of a shard needs in addition: sums of whole layers, or whole matrices."""
    if not isinstance(optimizer_class, type):
        return {}
    if issubclass(optimizer_class, LayerwiseOptimizer):
        return {"layer_sums": LayerSums(parameters, shards=comm)}
    return {"whole_matrices": WholeMatrices(parameters)} if issubclass(optimizer_class, Muon) else {}
