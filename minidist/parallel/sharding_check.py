"""Checks that submodules are reduced as their module is: over the same ranks, and with the same divisor.

Proved by: tests/parallel/test_fully_shard.py, tests/misuse/test_misuse.py
"""

from collections.abc import Collection, Sequence

from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import Parameter
from minidist.core.comm import Comm
from minidist.core.nn.module import Module
from minidist.core.parallel.fsdp import states_of, units_of


def check_sharding(module: Module, op: str, ignored: Collection[Parameter], comms: Sequence[Comm]) -> None:
    """Raise UsageError when `fully_shard` of a module does not go with what is wrapped inside it. Sends nothing.

    op: "avg" or "sum". ignored: parameters that the user takes care of. comms: the communicator whose ranks share the
    shards, and, if there is a second one, the communicator whose ranks hold equal copies of a shard.
    """
    if any(state.module is module for state in states_of(module)):
        name = module.name or type(module).__name__
        raise UsageError(f"{name!r} is sharded already; call fully_shard once per module")
    _check_unowned(module, op, ignored)
    _check_ranks(module, comms)


def _check_unowned(module: Module, op: str, ignored: Collection[Parameter]) -> None:
    """Raise UsageError when a part of `module` would not be reduced as the rest is."""
    # Flat parameters that are not a unit belong to another strategy or to an optimizer: they would never be reduced.
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter not in ignored}
    for name, parameter in parameters.items():
        flat = parameter.flat
        if flat is not None and (flat.shard is None or flat.shard.own is None):
            raise UsageError(
                f"parameter {name!r} belongs to a FlatParameters or another wrapper already, so its gradient would stay"
                " that of this rank's rows; call fully_shard first, and make the optimizer afterwards:"
                " AdamW(sharded_parameters(model))"
            )

    if states_of(module):
        _check_reductions(module, op)
        return
    if not parameters:
        raise UsageError(
            f"{type(module).__name__} has no parameters{' but ignored ones' if ignored else ''}; set its layers as"
            " attributes (also in lists or dicts), or leave fully_shard out"
        )
    if all(p.flat is not None for p in parameters.values()):
        raise UsageError(
            f"every parameter of {module.name or type(module).__name__!r} belongs to a module that is sharded already;"
            " shard inner modules first, and the model last"
        )


def _check_reductions(module: Module, op: str) -> None:
    """Raise UsageError unless the gradients of all units are means, or all are sums: the loss has one divisor."""
    for unit in units_of(module):
        if unit.guard.op != op:
            mine, theirs = ("mean" if one == "avg" else "sum" for one in (op, unit.guard.op))
            raise UsageError(
                f"reduction={quoted(mine)} here and {theirs!r} for the unit of {unit.flat.names[0]!r} inside;"
                " pass the same reduction= to every fully_shard of a model"
            )


def _check_ranks(module: Module, comms: Sequence[Comm]) -> None:
    """Raise UsageError when a module inside is sharded over other ranks: one stream gathers the units of a model."""
    comm, mine = comms[0], _ranks(*comms)
    for state in states_of(module):
        theirs = _ranks(*state.guard.comms)
        if mine != theirs:
            outer, inner = (m.name or type(m).__name__ for m in (module, state.module))
            raise UsageError(
                f"rank {comm.members[comm.rank]}: fully_shard of {outer!r} over {_in_words(mine)}, and of {inner!r}"
                f" inside it over {_in_words(theirs)}; pass the same mesh= to every fully_shard of a model"
            )


def _ranks(*comms: Comm) -> list[list[int]]:
    """Return the ranks over which a unit is sharded, then, if there are any, those with equal copies of this shard."""
    return [list(comm.members) for comm in comms]


def _in_words(ranks: list[list[int]]) -> str:
    return " with equal copies on ".join(f"ranks {quoted(members)}" for members in ranks)
