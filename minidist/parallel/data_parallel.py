"""`DistributedDataParallel` with PyTorch's options, which are not the core's.

    no_sync                  gradients of passes stay local
    find_unused_parameters   a branch of the model that this batch does not use takes part as zeros
    ignored_params           the user takes care of some parameters
    register_comm_hook       another reduction of each bucket, such as a compressed one

Proved by: tests/parallel/test_data_parallel.py, tests/parallel/test_unused_parameters.py
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.flat import FlatParameters
from minidist.core.nn.module import Module
from minidist.core.parallel import data_parallel
from minidist.core.parallel.data_parallel import BUCKET_MEGABYTES, Bucket, operation_of


@contextmanager
def no_sync(reducer: data_parallel.GradientReducer) -> Iterator[None]:
    """Let the gradients of passes in the block stay local."""
    before, reducer.synchronizing = reducer.synchronizing, False
    try:
        yield
    finally:
        reducer.synchronizing = before


class GradientReducer(data_parallel.GradientReducer):
    """The core's class, with `no_sync`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Let the gradients of passes in the block stay local."""
        return no_sync(self)


class DistributedDataParallel(data_parallel.DistributedDataParallel):
    """Wraps `module` so that a plain `loss.backward()` leaves the reduced gradient on every rank of `comm`.

    reduction: "mean" (PyTorch's) or "sum" (divide the loss by the global count yourself). bucket_cap_mb, algorithm: see
    `GradientReducer`. find_unused_parameters: parameters without a gradient take part as zeros instead of raising; one
    that no rank has used has no gradient afterwards; costs one byte per parameter and pass. flat: the model's
    FlatParameters, when it has one already. ignored_params: neither broadcast nor summed: you do it yourself. Of other
    parameters of the loss that no wrapper has, the first backward pass raises UsageError.

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
        ignored_params = set(ignored_params)
        parameters = [parameter for parameter in module.parameters() if parameter not in ignored_params]
        if flat is None and not parameters:
            raise UsageError(
                f"rank {comm.rank}: {type(module).__name__} has no parameters, so there is no gradient to sum;"
                " set its layers as attributes (also in lists or dicts), or leave the wrapper out"
            )
        if len({parameter.name for parameter in parameters}) < len(parameters):
            from minidist.base.warn import warn_of_equal_names

            warn_of_equal_names(type(module).__name__, [parameter.name for parameter in parameters])
        if find_unused_parameters:
            from minidist.parallel.unused import ZerosReducer  # it loads ZeRO, which other programs do not need

            self.reducer_type = ZerosReducer
        super().__init__(
            module,
            comm,
            reduction=reduction,
            bucket_cap_mb=bucket_cap_mb,
            algorithm=algorithm,
            flat=FlatParameters(parameters) if flat is None else flat,
        )
        self.reducer.guard.covers(module, (*self.flat.parameters, *ignored_params))

    def extra_repr(self) -> str:
        """The number of replicas."""
        return f"{self.comm.size} replicas"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise not_copied("DistributedDataParallel", self.comm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of passes whose forward runs in the block stay local; the next one outside sums the total."""
        return no_sync(self.reducer)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Bucket], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket in place of the all-reduce; see parallel/comm_hooks.py."""
        from minidist.parallel.comm_hooks import register_comm_hook

        register_comm_hook(self.reducer, state, hook)


def not_copied(what: str, comm: Comm) -> UsageError:
    """Return the error of copy.deepcopy or pickle of a wrapper: its ranks' messages belong to one object each."""
    return UsageError(
        f"rank {comm.rank}: a {what} cannot be copied or pickled; copy the model before it is wrapped"
        " (of a DistributedDataParallel also later: copy.deepcopy(wrapper.module)), and wrap the copy"
    )
