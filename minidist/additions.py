"""What this package adds to its core, wherever the core runs: imported with the package, it loads nothing else.

Each function imports what it needs when the core calls it.

Proved by: tests/base/test_hooks.py
"""

from functools import cache
from typing import Any

from minidist.core.base import hooks

# Files of minidist/collectives that register no algorithm.
_NO_ALGORITHMS = (
    "algorithms",
    "auto",
    "call",
    "call_checks",
    "closed_forms",
    "collective_check",
    "folding",
    "nodes",
    "one_event",
    "reduction_order",
    "ring_event",
    "rooted",
    "summation_order",
    "tuning",
    "user_algorithms",
)


def _choose(comm: Any, operation: str, nbytes: int) -> str:
    from minidist.collectives.auto import choose

    return choose(comm, operation, nbytes)


def _check_call(*arguments: Any, **keywords: Any) -> None:
    from minidist.collectives.call_checks import check_call

    hooks.check_call = check_call
    check_call(*arguments, **keywords)


def _more_algorithms() -> None:
    from minidist import collectives
    from minidist.core.base.registry import import_modules

    import_modules(collectives.__name__, collectives.__path__, without=_NO_ALGORITHMS)


def _more_schedules() -> None:
    import minidist.pipeline.schedules  # noqa: F401  its files register them


def _narrow_sum(op: str, total: Any, contribution: Any) -> bool:
    from minidist.collectives.call_checks import narrow_sum

    hooks.narrow_sum = narrow_sum
    return narrow_sum(op, total, contribution)


def _algorithm_of_a_file(operation: str, name: str) -> Any:
    if ".py:" not in name:
        return None
    from minidist.collectives.user_algorithms import load_algorithm

    return load_algorithm(name, operation)[1]


@cache
def _one_event() -> Any:
    from minidist.collectives import one_event

    return one_event


def _guard(op: str, *comms: Any) -> Any:
    from minidist.parallel.replica_guard import ReplicaGuard

    return ReplicaGuard(op, *comms)


def _message_checks() -> Any:
    from minidist.comm import message_checks

    hooks.message_checks = lambda: message_checks
    return message_checks


def _comm_checks() -> Any:
    from minidist.comm import communicator

    hooks.comm_checks = lambda: communicator
    return communicator


def _any_source() -> Any:
    from minidist.comm.sim import any_source

    hooks.any_source = lambda: any_source
    return any_source


def _fibers() -> Any:
    from minidist.base import promise_fibers

    return promise_fibers


@cache
def _kernels_of(kind: Any) -> Any:
    """Return meta_kernels.py for the type of arrays without data, cuda.py for CuPy's, None for all others."""
    if getattr(kind, "is_meta", False):
        from minidist.base import meta_kernels

        return meta_kernels
    if kind.__module__.partition(".")[0] != "cupy":
        return None
    from minidist.base import cuda

    return cuda


def _half() -> Any:
    from minidist.base import half

    hooks.half = lambda: half  # the next call finds it
    return half


def _precision() -> Any:
    from minidist.nn.ops import precision

    hooks.precision = lambda: precision
    return precision


def _saved_tensor(tensor: Any, version: int, array: Any) -> Any:
    from minidist.nn.ops.in_place import SampledTensor

    hooks.saved_tensor = SampledTensor
    return SampledTensor(tensor, version, array)


def _operation_checks() -> Any:
    from minidist.nn.ops import refusals

    hooks.operation_checks = lambda: refusals
    return refusals


def _tensor_methods() -> Any:
    from minidist.nn.ops import tensor_methods

    hooks.tensor_methods = lambda: tensor_methods
    return tensor_methods


def _dropout(p: float) -> Any:
    from minidist.nn.dropout import AttentionDropout, Dropout

    hooks.dropout, hooks.attention_dropout = Dropout, AttentionDropout
    return Dropout(p)


def _attention_dropout(p: float, heads: int) -> Any:
    from minidist.nn.dropout import AttentionDropout

    return AttentionDropout(p, heads)


def _batch_coordinates(*arguments: Any) -> Any:
    from minidist.base.coordinates import batch_coordinates

    hooks.batch_coordinates = batch_coordinates
    return batch_coordinates(*arguments)


def _dropped_weights(*arguments: Any) -> Any:
    from minidist.nn.ops.dropout import dropped_weights

    return dropped_weights(*arguments)


def _map_object(value: Any, function: Any) -> Any:
    from minidist.nn.ops.objects import map_object

    return map_object(value, function)


def _refusals() -> Any:
    from minidist.nn import refusals

    hooks.refusals = lambda: refusals
    return refusals


def _buffers(module: Any) -> dict[str, Any]:
    from minidist.nn.buffers import named_buffers

    return dict(named_buffers(module))


def _load_state_dict(module: Any, state: Any, strict: bool) -> tuple[list[str], list[str]]:
    from minidist.nn.state import load_state_dict

    return load_state_dict(module, state, strict)


def _optimizer_checks() -> Any:
    from minidist.optim import checks

    hooks.optimizer_checks = lambda: checks
    return checks


def _checked_setting(name: str, value: Any) -> Any:
    from minidist.optim.checks import CHECKS

    return CHECKS[name](name, value)


def _check_number(*arguments: Any, **keywords: Any) -> float:
    from minidist.base.limits import check_number

    hooks.check_number = check_number
    return check_number(*arguments, **keywords)


def _check_whole(*arguments: Any, **keywords: Any) -> int:
    from minidist.base.limits import check_whole

    hooks.check_whole = check_whole
    return check_whole(*arguments, **keywords)


def _describe_step(optimizer: Any) -> str:
    from minidist.optim.checks import describe_step

    hooks.describe_step = describe_step
    return describe_step(optimizer)


def _cut_run(run: Any, kinds: list[Any]) -> list[Any]:
    from minidist.optim.runs import cut_run

    return cut_run(run, kinds)


def _optimizer_attribute(optimizer: Any, name: str) -> Any:
    if name not in ("state", "counts", "state_dict", "load_state_dict", "refresh"):
        return object.__getattribute__(optimizer, name)  # raises AttributeError
    from minidist.optim.state import attribute

    return attribute(optimizer, name)


def _describe(module: Any) -> str:
    from minidist.nn.describe import describe

    return describe(module)


def _move(module: Any, device: Any) -> None:
    from minidist.nn.moving import move

    move(module, device)


def _check_weights(*arguments: Any) -> None:
    from minidist.parallel.weights_check import check_weights

    check_weights(*arguments)


def _plan(model: Any, sequence_parallel: bool) -> Any:
    """Return the plan of a Llama, of a model with experts, and of a split sequence."""
    config = getattr(model, "config", None)
    if not sequence_parallel and not getattr(config, "n_experts", 0) and not hasattr(config, "num_local_experts"):
        return None
    from minidist.parallel.expert.tensor_parallel import plan_of

    return plan_of(model, sequence_parallel)


def _ring(comm: Any, length: int, inner: Any, neighbours: int) -> Any:
    """Return ring attention, where one rank stands for many as one event."""
    if comm.world.folds:
        from minidist.parallel.context.ring_event import RingAttentionEvent

        return RingAttentionEvent(comm, length)
    from minidist.core.parallel.context.ring_attention import RingAttention

    return RingAttention(comm, length)


def _all_gather(comm: Any, length: int, inner: Any, neighbours: int) -> Any:
    from minidist.parallel.context.all_gather_attention import AllGatherAttention

    return AllGatherAttention(comm, length)


def _ulysses(comm: Any, length: int, inner: Any, neighbours: int) -> Any:
    from minidist.parallel.context.ulysses import UlyssesAttention

    return UlyssesAttention(comm, length, inner)


def _ulysses_ring(comm: Any, length: int, inner: Any, neighbours: int) -> Any:
    from minidist.parallel.context.ulysses_ring import UlyssesRingAttention

    return UlyssesRingAttention(comm, length, neighbours)


def _refuse_layout(layout: Any, comm: Any) -> None:
    from minidist.parallel.fitting_dims import refuse_layout

    refuse_layout(layout, comm)


def _check_schedule(*arguments: Any) -> None:
    from minidist.pipeline.schedules.refusals import check_schedule

    check_schedule(*arguments)


def _validate_plan(plan: Any, allow_wrong_gradients: bool) -> Any:
    from minidist.pipeline.validate import validate

    return validate(plan, allow_wrong_gradients)


def _prevent_deadlocks(plan: Any, orders: Any, rank_of: Any) -> None:
    from minidist.pipeline.deadlocks import prevent_deadlocks

    prevent_deadlocks(plan, orders, rank_of)


def _arrived_gradients(messages: Any) -> dict[int, list[Any]]:
    from minidist.pipeline.runtime.early_release import arrived_gradients

    return arrived_gradients(messages)


def _pipeline_refusals() -> Any:
    from minidist.pipeline.runtime import refusals

    return refusals


def _combine_statistics(module: Any, comm: Any, ranks: Any, data: Any) -> Any:
    from minidist.parallel.running_statistics import RunningStatistics, exchange_among

    statistics = RunningStatistics(module, exchange_among(comm, ranks), data)
    return statistics.combine if statistics.layers else None


def _shard_with_options(*arguments: Any) -> None:
    from minidist.parallel.fsdp_options import shard_with_options

    shard_with_options(*arguments)


def _replica_reducers(*arguments: Any) -> Any:
    from minidist.pipeline.runtime.replica_reducers import replica_reducers

    return replica_reducers(*arguments)


hooks.choosers["auto"] = _choose
hooks.check_call = _check_call
hooks.more_algorithms.append(_more_algorithms)
hooks.more_schedules.append(_more_schedules)
hooks.algorithm_sources.append(_algorithm_of_a_file)
hooks.model_checks.append(_check_weights)
hooks.plan_sources.append(_plan)
hooks.attentions.update({"ring": _ring, "all-gather": _all_gather, "ulysses": _ulysses, "ulysses-ring": _ulysses_ring})
hooks.guards.append(_guard)
hooks.one_event.append(_one_event)
hooks.message_checks = _message_checks
hooks.comm_checks = _comm_checks
hooks.any_source = _any_source
hooks.fibers = _fibers
hooks.kernels_of = _kernels_of
hooks.half = _half
hooks.narrow_sum = _narrow_sum
hooks.precision = _precision
hooks.saved_tensor = _saved_tensor
hooks.batch_coordinates = _batch_coordinates
hooks.operation_checks = _operation_checks
hooks.tensor_methods = _tensor_methods
hooks.dropout = _dropout
hooks.attention_dropout = _attention_dropout
hooks.dropped_weights = _dropped_weights
hooks.map_object = _map_object
hooks.refusals = _refusals
hooks.buffers = _buffers
hooks.load_state_dict = _load_state_dict
hooks.optimizer_checks = _optimizer_checks
hooks.checked_setting = _checked_setting
hooks.check_number = _check_number
hooks.check_whole = _check_whole
hooks.describe_step = _describe_step
hooks.cut_run = _cut_run
hooks.optimizer_attribute = _optimizer_attribute
hooks.describe = _describe
hooks.move = _move
hooks.refuse_layout = _refuse_layout
hooks.check_schedule = _check_schedule
hooks.validate_plan = _validate_plan
hooks.prevent_deadlocks = _prevent_deadlocks
hooks.arrived_gradients = _arrived_gradients
hooks.pipeline_refusals = _pipeline_refusals
hooks.combine_statistics = _combine_statistics
hooks.shard_with_options = _shard_with_options
hooks.replica_reducers = _replica_reducers
