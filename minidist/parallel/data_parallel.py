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

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from minidist.autograd import Parameter, backward_hooks
from minidist.base import arrays as xp
from minidist.base.errors import MismatchError, UsageError, quoted
from minidist.base.fingerprint import fingerprint
from minidist.base.trace import purpose
from minidist.collectives import broadcast
from minidist.comm import Comm, Work, check_communicator
from minidist.nn.flat import FlatParameters
from minidist.nn.module import Module
from minidist.parallel.axes_check import check_axes
from minidist.parallel.gradients import BUCKET_MEGABYTES, Bucket, GradientReducer

DIGEST_BYTES = 16  # of the fingerprints of the model's names and shapes and of the settings, which all ranks compare


class DistributedDataParallel(Module):
    """Wraps `module` so that a plain `loss.backward()` leaves the reduced gradient on every rank of `comm`.

    reduction: "mean" (PyTorch's) or "sum" (divide the loss by the global count yourself). bucket_cap_mb, algorithm: see
    `GradientReducer`. find_unused_parameters: parameters without a gradient take part as zeros instead of raising; one
    that no rank has used has no gradient afterwards.
    flat: the model's FlatParameters, when it has one already. ignored_params: neither broadcast nor summed: you do it
    yourself. Of other parameters of the loss that no wrapper has, the first backward pass raises UsageError.

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
        if reduction not in ("mean", "sum"):
            raise UsageError(f"reduction={quoted(reduction)}; it must be 'mean' or 'sum'")
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
        check_axes("DistributedDataParallel", module, self.flat.parameters, comm)
        settings = {
            "reduction": reduction,
            "bucket_cap_mb": bucket_cap_mb,
            "algorithm": algorithm,
            "find_unused_parameters": find_unused_parameters,
        }
        check_same_model(self.flat, comm, "DistributedDataParallel", settings)
        with purpose("startup"):
            broadcast(comm, self.flat.data)
        self.flat.load_checks.append(partial(check_same_values, self.flat, comm))

        # Equal gradients: from here on, plain `loss.backward()` sums them over the ranks.
        self.reducer = GradientReducer(
            self.flat,
            comm,
            op="avg" if reduction == "mean" else "sum",
            algorithm=algorithm,
            bucket_cap_mb=bucket_cap_mb,
            unused="zeros" if find_unused_parameters else "error",
        )
        self.reducer.observe()
        self.reducer.belongs_to(module, ignored_params)

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

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Bucket], Work]) -> None:
        """Replace the all-reduce of a bucket by `hook(state, bucket)`, which starts a reduction and returns its Work.

        The result must be in `bucket.buffer` after the Work's wait. Each rank calls it once per bucket, in index order.
        state: such as a `Compressor`, whose `op` must be this wrapper's reduction.
        """
        op, own = getattr(state, "op", None), "mean" if self.reducer.op == "avg" else "sum"
        if op in ("mean", "sum") and op != own:
            raise UsageError(
                f"rank {self.comm.rank}: this DistributedDataParallel has reduction={own!r}, and the hook's state"
                f" op={op!r}, so the gradient would be scaled wrongly by {self.comm.size}; make it with op={own!r}"
            )
        self.reducer.replace_communication(partial(hook, state))


def not_copied(what: str, comm: Comm) -> UsageError:
    """Return the error of copy.deepcopy or pickle of a wrapper: its ranks' messages belong to one object each."""
    return UsageError(
        f"rank {comm.rank}: a {what} cannot be copied or pickled; copy the model before it is wrapped"
        " (of a DistributedDataParallel also later: copy.deepcopy(wrapper.module)), and wrap the copy"
    )


def startup_bytes(units: Sequence[int], itemsize: int, ranks: int) -> int:
    """Return the bytes that all `ranks` together send at construction, for units of these numbers of elements."""
    return (ranks - 1) * sum(elements * itemsize + DIGEST_BYTES for elements in units)


def ddp_volume(gradient: int, ranks: int) -> dict[str, int]:
    """Return the elements that all `ranks` together send per reduction of a gradient of `elements` elements.

    Every rank sends 2 (n-1)/n of it: a reduce-scatter and an all-gather make an all-reduce.
    """
    return {"gradient_reduce": 2 * (ranks - 1) * gradient}


def check_same_model(flat: FlatParameters, comm: Comm, wrapper: str, settings: Mapping[str, Any]) -> None:
    """Compare digests of names and shapes (8 B) and of settings (8 B) with rank 0's, where messages depend on them.

    wrapper: whose `settings` they are, by name. Raises MismatchError on a rank where one of the two differs.
    """
    # A broadcast of 16 bytes instead of all names: the ranks would hang, or add unrelated gradients, if their models
    # or settings differed.
    text = repr([(p.name, p.shape, str(p.dtype), p.requires_grad) for p in flat.parameters])
    said = ", ".join(f"{name}={_in_words(value)}" for name, value in settings.items())
    half = DIGEST_BYTES // 2
    mine = xp.concatenate([fingerprint(text, half), fingerprint(f"{wrapper} {said}", half)])
    with purpose("startup"):
        theirs: Any = broadcast(comm, mine.copy())

    # The model first: of another one the settings say nothing.
    if not xp.array_equal(mine[:half], theirs[:half]):
        raise MismatchError(
            f"rank {comm.rank}: its model differs from rank 0's in a parameter's name, shape, dtype or requires_grad; "
            f"here it has {len(flat)} parameters and {flat.numel} elements; build the same model on every rank"
        )
    if not xp.array_equal(mine, theirs):
        raise MismatchError(
            f"rank {comm.rank}: its {wrapper} has other settings than rank 0's; here they are {said}; pass the same"
            " settings on every rank, or the ranks would send other messages or compute other numbers"
        )


def _in_words(value: Any) -> str:
    """Return a setting as text that is equal where the values are: 25 and 25.0 are."""
    return f"{value:.12g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def check_same_values(flat: FlatParameters, comm: Comm) -> None:
    """Compare a digest of the values (16 B) with rank 0's after a `load_state_dict`, which every rank must make.

    Raises MismatchError on a rank where it differs. Of ranks that loaded nothing the next collective meets this one,
    which is called load_state_dict.
    """
    if comm.size == 1:
        return
    mine = fingerprint(flat.data.tobytes(), DIGEST_BYTES)
    with purpose("startup"):
        theirs: Any = broadcast(comm.collective("load_state_dict"), mine.copy())
    if not xp.array_equal(mine, theirs):
        raise MismatchError(
            f"rank {comm.rank}: load_state_dict gave its replica other values than rank 0's, and they would train"
            " apart; load the same state on every rank, or load it before wrapping the model"
        )
