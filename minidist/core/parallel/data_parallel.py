"""Data parallelism: every rank holds the whole model, computes on its own rows, and the gradients are summed.

    rank 0   rows 0..3    forward, backward ──┐
    rank 1   rows 4..7    forward, backward ──┼─ all-reduce of the gradients ──▶ the same step on every rank
    rank 2   rows 8..11   forward, backward ──┘

It equals training on one device with the whole batch (up to rounding; job/equality/reference.py says when bit for bit)
when three things hold: the replicas start equal, every gradient of every layer is summed, and the divisor of the loss
is the *global* batch. With reduction="sum" each rank divides its loss by the global number of rows or tokens, which is
right for shards of unequal size, too. reduction="mean" divides the sum by the number of ranks: PyTorch's meaning, right
for shards of equal size; losses that are means over different numbers of rows are refused when the gradients meet.

A step sends 2 (n-1)/n of the model's bytes from each rank, independent of the batch.

Proved by: tests/parallel/test_data_parallel.py
"""

from functools import partial
from typing import Any

from minidist.core.autograd import backward_hooks
from minidist.core.base.trace import purpose
from minidist.core.collectives import broadcast
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters
from minidist.core.nn.module import Module
from minidist.core.parallel.gradients import BUCKET_MEGABYTES, GradientReducer, Guard, new_guard, operation_of


class DistributedDataParallel(Module):
    """Wraps `module` so that a plain `loss.backward()` leaves the reduced gradient on every rank of `comm`.

    reduction: "mean" or "sum". bucket_cap_mb, algorithm: see `GradientReducer`. flat: the model's FlatParameters, when
    it has one already. At construction rank 0 sends its parameters to all ranks (purpose `startup`).
    `minidist.parallel.data_parallel` has a class with further options.
    """

    reducer_type = GradientReducer

    def __init__(
        self,
        module: Module,
        comm: Comm,
        *,
        reduction: str = "mean",
        bucket_cap_mb: float = BUCKET_MEGABYTES,
        algorithm: str = "ring",
        flat: FlatParameters | None = None,
    ) -> None:
        self.module, self.comm = module, comm

        # Equal replicas: the same model on every rank, with rank 0's values.
        self.flat = FlatParameters(module.parameters()) if flat is None else flat
        settings = {
            "reduction": reduction,
            "bucket_cap_mb": bucket_cap_mb,
            "algorithm": algorithm,
            "find_unused_parameters": self.reducer_type.unused == "zeros",
        }
        guard = equal_replicas("DistributedDataParallel", module, self.flat, settings, comm)

        # Equal gradients: from here on, plain `loss.backward()` sums them over the ranks.
        self.reducer = self.reducer_type(
            self.flat, comm, op=guard.op, algorithm=algorithm, bucket_cap_mb=bucket_cap_mb, guard=guard
        )
        self.reducer.observe()
        guard.covers(module, self.flat.parameters)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the module's output for this rank's rows; its backward knows whether to sum over ranks."""
        self.reducer.guard.forward_begins(None)
        # Whether this graph synchronizes is decided by its forward, as in PyTorch: backward may run after `no_sync` has
        # ended.
        begins = partial(self.reducer.graph_begins, self.reducer.synchronizing)
        return backward_hooks(self.module(*arguments, **keywords), begins, "output of data parallelism")


def equal_replicas(wrapper: str, module: Any, flat: FlatParameters, settings: dict[str, Any], comm: Comm) -> Guard:
    """Give every rank the parameters of rank 0, and return the guard of the wrapper. settings: equal on every rank."""
    guard = new_guard(operation_of(settings["reduction"]), comm)
    guard.wraps(wrapper, module, flat, settings, comm)
    with purpose("startup"):
        broadcast(comm, flat.data)
    return guard
