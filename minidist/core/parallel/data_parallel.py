"""Data parallelism: every rank holds the whole model, computes on its own rows, and the gradients are summed.

    rank 0   rows 0..3    forward, backward ──┐
    rank 1   rows 4..7    forward, backward ──┼─ all-reduce of the gradients ──▶ the same step on every rank
    rank 2   rows 8..11   forward, backward ──┘

It equals training on one device with the whole batch (up to rounding; job/equality/reference.py says when bit for bit)
when three things hold: the replicas start equal (rank 0's values are broadcast), every gradient of every layer is
summed, and the divisor of the loss is the *global* batch. With reduction="sum" each rank divides its loss by the global
number of rows or tokens, which is right for shards of unequal size, too. reduction="mean" divides the sum by the number
of ranks: PyTorch's meaning, right for shards of equal size. Losses that are means over unlike numbers of rows are
refused then, when the gradient messages meet (`Bucket.equal`).

A step sends 2 (n-1)/n of the model's bytes from each rank, independent of the batch.

Proved by: tests/parallel/test_data_parallel.py
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from minidist.core.autograd import Parameter, backward_hooks
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import broadcast
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.flat import FlatParameters
from minidist.core.nn.module import Module
from minidist.core.parallel.gradients import BUCKET_MEGABYTES, Bucket, GradientReducer
from minidist.core.parallel.guard import Guard, new_guard, operation_of


class DistributedDataParallel(Module):
    """Wraps `module` so that a plain `loss.backward()` leaves the reduced gradient on every rank of `comm`.

    reduction: "mean" (PyTorch's) or "sum" (divide the loss by the global count yourself). bucket_cap_mb, algorithm: see
    `GradientReducer`. find_unused_parameters: parameters without a gradient take part as zeros instead of raising; one
    that no rank has used has no gradient afterwards. flat: the model's FlatParameters, when it has one already.
    ignored_params: neither broadcast nor summed: you do it yourself. Of other parameters of the loss that no wrapper
    has, the first backward pass raises UsageError.

    At construction rank 0 sends its parameters to all ranks (purpose `startup`): replicas built from different seeds
    become equal. Raises MismatchError when the ranks built different models.
    """

    def __init__(
        self,
        module: Module,
        comm: Comm,
        *,
        reduction: str = "mean",
        bucket_cap_mb: float = BUCKET_MEGABYTES,
        algorithm: str = "ring",
        find_unused_parameters: bool = False,
        flat: FlatParameters | None = None,
        ignored_params: Collection[Parameter] = (),
    ) -> None:
        operation_of(reduction)
        if not isinstance(module, Module):
            raise UsageError(
                f"DistributedDataParallel got a value of type {type(module).__name__} as its module; pass the model,"
                " and then the communicator: DistributedDataParallel(model, comm)"
            )
        check_communicator(comm, "DistributedDataParallel")
        self.module, self.comm, ignored_params = module, comm, set(ignored_params)
        parameters = [parameter for parameter in module.parameters() if parameter not in ignored_params]
        if flat is None and not parameters:
            raise UsageError(
                f"rank {comm.rank}: {type(module).__name__} has no parameters, so there is no gradient to sum;"
                " set its layers as attributes (also in lists or dicts), or leave the wrapper out"
            )

        # Equal replicas: the same model on every rank, with rank 0's values.
        self.flat = FlatParameters(parameters) if flat is None else flat
        settings = {
            "reduction": reduction,
            "bucket_cap_mb": bucket_cap_mb,
            "algorithm": algorithm,
            "find_unused_parameters": find_unused_parameters,
        }
        guard = equal_replicas("DistributedDataParallel", module, self.flat, settings, comm)

        # Equal gradients: from here on, plain `loss.backward()` sums them over the ranks.
        self.reducer = GradientReducer(
            self.flat,
            comm,
            op=guard.op,
            algorithm=algorithm,
            bucket_cap_mb=bucket_cap_mb,
            unused="zeros" if find_unused_parameters else "error",
            guard=guard,
        )
        self.reducer.observe()
        guard.covers(module, (*self.flat.parameters, *ignored_params))

    def extra_repr(self) -> str:
        """The number of replicas."""
        return f"{self.comm.size} replicas"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied("DistributedDataParallel", self.comm)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the module's output for this rank's rows; its backward knows whether to sum over ranks."""
        self.reducer.note_mode()
        # Whether this graph synchronizes is decided by its forward, as in PyTorch: backward may run after `no_sync` has
        # ended.
        begins = partial(self.reducer.graph_begins, self.reducer.synchronizing)
        return backward_hooks(self.module(*arguments, **keywords), begins, "output of data parallelism")

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of passes whose forward runs in the block stay local; the next one outside sums the total."""
        return self.reducer.no_sync()

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Bucket], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket in place of the all-reduce."""
        hooks.register_comm_hook(self.reducer, state, hook)


def equal_replicas(wrapper: str, module: Any, flat: FlatParameters, settings: dict[str, Any], comm: Comm) -> Guard:
    """Give every rank the parameters of rank 0, and return the guard of the wrapper. settings: equal on every rank."""
    guard = new_guard(operation_of(settings["reduction"]), comm)
    guard.wraps(wrapper, module, flat, settings, comm)
    with purpose("startup"):
        broadcast(comm, flat.data)
    return guard


def not_copied(what: str, comm: Comm) -> UsageError:
    """Return the error of copy.deepcopy or pickle of a wrapper: its ranks' messages belong to one object each."""
    return UsageError(
        f"rank {comm.rank}: a {what} cannot be copied or pickled; copy the model before it is wrapped"
        " (of a DistributedDataParallel also later: copy.deepcopy(wrapper.module)), and wrap the copy"
    )
