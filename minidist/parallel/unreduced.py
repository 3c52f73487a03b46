"""The errors of a backward pass whose gradients would stay wrong after any reduction.

Proved by: tests/misuse/test_misuse.py, tests/parallel/test_data_parallel.py
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base.errors import MinidistError, UsageError
from minidist.core.comm import Comm


class UnusedParameterError(MinidistError):
    """A parameter got no gradient in a step in which a reduction waits for it. so: what follows; then what may help."""

    def __init__(self, rank: int, parameter: Parameter, so: str, freeze: str = "freeze it") -> None:
        super().__init__(
            f"rank {rank}: parameter {parameter.name!r} got no gradient in this backward pass, so {so}; use it in the"
            " loss (an array that a layer returns in place of a Tensor ends the graph),"
            f" {freeze}, or pass find_unused_parameters=True"
        )


def was_frozen(rank: int, parameter: Parameter) -> UsageError:
    """Return the error of a parameter without a bucket that got a gradient."""
    return UsageError(
        f"rank {rank}: parameter {parameter.name!r} was frozen when its gradients were cut into"
        " buckets, so no rank would reduce it; set requires_grad before wrapping the model, or wrap it anew"
    )


def mean_of_one_rank(comm: Comm, ranks: int) -> UsageError:
    """Return the error of a loss that is a mean over this rank's rows where the losses of all ranks are added."""
    return UsageError(
        f"rank {comm.rank}: reduction='sum' adds the losses of {ranks} ranks, and this loss is the mean over this"
        f" rank's rows alone, so the gradient would be {ranks} times too large; give the loss"
        " divisor=(the rows or tokens of all ranks), or use reduction='mean'"
    )


def refuse_unreduced(
    module: Any,
    reached: Iterable[Parameter],
    members: Collection[Parameter],
    known: Collection[Parameter],
    comm: Comm,
    ranks: int,
) -> Collection[Parameter]:
    """Raise UsageError when the gradient of a parameter that a pass `reached` would stay that of one rank's rows.

    members: the parameters of `module`, if there is one, when it was wrapped. known: those that are taken care of.
    ranks: how many see other rows. Returns those that are found to be taken care of, too. It sends nothing: every rank
    runs the same graph and raises the same error.
    """
    # What came into the module later has no bucket and no shard on any rank.
    names = {} if module is None else {p: name for name, p in module.named_parameters()}
    reached = [parameter for parameter in reached if parameter not in known]
    for parameter in reached:
        if parameter in names and parameter not in members:
            raise UsageError(
                f"rank {comm.rank}: parameter {names[parameter]!r} was added to the model after it was"
                " wrapped, so its gradient would stay that of this rank's rows; build the whole model before you"
                " wrap or shard it"
            )

    # The loss may depend on more than this module: on what another wrapper observes, or another sharded module has.
    unreduced = [p for p in reached if not p.observers and (p.flat is None or p.flat.shard is None)]
    if unreduced and ranks > 1:
        raise _no_wrapper(unreduced, names, comm, ranks)
    return reached


def _no_wrapper(unreduced: Sequence[Parameter], names: Mapping[Parameter, str], comm: Comm, ranks: int) -> UsageError:
    listed = ", ".join(repr(names.get(p) or p.name or f"of shape {p.shape}") for p in unreduced[:3])
    more = f" and {len(unreduced) - 3} more" if len(unreduced) > 3 else ""
    s = "" if len(unreduced) == 1 else "s"
    return UsageError(
        f"rank {comm.rank}: no wrapper sums the gradient{s} of parameter{s} {listed}{more} over the {ranks}"
        " ranks, so the weights would drift apart; call fully_shard on the whole model last, wrap the rest with"
        " DistributedDataParallel too, or pass ignored_params= when you sum them yourself"
    )
