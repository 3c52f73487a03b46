"""What this package adds to its core, wherever the core runs: imported with the package, it loads nothing else.

Each function imports what it needs when the core calls it.

Proved by: tests/base/test_hooks.py
"""

from typing import Any

from minidist.base import hooks

# Files of minidist/collectives that register no algorithm.
_NO_ALGORITHMS = (
    "auto",
    "calls",
    "closed_forms",
    "nodes",
    "one_event",
    "operations",
    "registry",
    "ring_event",
    "tuning",
    "user_algorithms",
)


def _choose(comm: Any, operation: str, nbytes: int) -> str:
    from minidist.collectives.auto import choose

    return choose(comm, operation, nbytes)


def _more_algorithms() -> None:
    from minidist import collectives
    from minidist.base.registry import import_modules

    import_modules(collectives.__name__, collectives.__path__, without=_NO_ALGORITHMS)


def _algorithm_of_a_file(operation: str, name: str) -> Any:
    if ".py:" not in name:
        return None
    from minidist.collectives.user_algorithms import load_algorithm

    return load_algorithm(name, operation)[1]


def _one_event() -> Any:
    from minidist.collectives import one_event

    return one_event


def _guard(op: str, *comms: Any) -> Any:
    from minidist.parallel.replica_guard import ReplicaGuard

    return ReplicaGuard(op, *comms)


def _shard_arguments(optimizer_class: Any, parameters: Any, comm: Any) -> dict[str, Any]:
    from minidist.optim import LayerwiseOptimizer, Muon

    if not isinstance(optimizer_class, type):
        return {}
    if issubclass(optimizer_class, LayerwiseOptimizer):
        from minidist.parallel.layer_sums import LayerSums

        return {"layer_sums": LayerSums(parameters, shards=comm)}
    if issubclass(optimizer_class, Muon):
        from minidist.parallel.whole_matrices import WholeMatrices

        return {"whole_matrices": WholeMatrices(parameters)}
    return {}


hooks.choosers["auto"] = _choose
hooks.more_algorithms.append(_more_algorithms)
hooks.algorithm_sources.append(_algorithm_of_a_file)
hooks.guards.append(_guard)
hooks.shard_arguments.append(_shard_arguments)
hooks.one_event.append(_one_event)
