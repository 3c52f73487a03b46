"""What this package adds to its core, wherever the core runs: imported with the package, it loads nothing else.

A hook of the core has a place in a table below, and the module is imported when the core calls the hook first.

Proved by: tests/base/test_hooks.py
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.core.base import hooks

# Hooks that return a module, and the module.
MODULES = {
    "comm_checks": "minidist.comm.communicator",
    "fibers": "minidist.base.promise_fibers",
    "half": "minidist.base.half",
    "limits": "minidist.base.limits",
    "module_methods": "minidist.nn.state",
    "operation_checks": "minidist.nn.ops.refusals",
    "wrong_arguments": "minidist.nn.wrong_arguments",
    "one_event": "minidist.collectives.one_event",
    "optimizer_checks": "minidist.optim.checks",
    "pipeline_refusals": "minidist.pipeline.runtime.refusals",
    "plan_methods": "minidist.pipeline.plan_methods",
    "precision": "minidist.nn.ops.precision",
    "refusals": "minidist.nn.refusals",
    "tensor_methods": "minidist.nn.ops.tensor_methods",
}
# Hooks that are a function or a class, and the module that has one of this name, or of the name that follows.
FUNCTIONS = {
    "attention_dropout": "minidist.nn.dropout:AttentionDropout",
    "batch_coordinates": "minidist.base.coordinates",
    "check_call": "minidist.collectives.call_checks",
    "check_divisible": "minidist.base.errors",
    "check_layout": "minidist.parallel.fitting_dims",
    "check_not_lowered": "minidist.pipeline.passes",
    "check_number": "minidist.base.limits",
    "check_reducer": "minidist.parallel.replica_guard",
    "check_schedule": "minidist.pipeline.schedules.refusals",
    "check_weights": "minidist.parallel.weights_check",
    "check_whole": "minidist.base.limits",
    "checked_setting": "minidist.optim.checks",
    "cut_run": "minidist.optim.runs",
    "describe": "minidist.nn.describe",
    "describe_step": "minidist.optim.checks:StepDescription",
    "dropout": "minidist.nn.dropout:Dropout",
    "dropped_weights": "minidist.nn.ops.dropout",
    "gather_logits": "minidist.parallel.tensor.gathering:GatherLogits",
    "guard": "minidist.parallel.replica_guard:ReplicaGuard",
    "map_object": "minidist.nn.ops.objects",
    "named_dtype": "minidist.base.arrays",
    "numbers_of": "minidist.base.arrays",
    "pipeline": "minidist.pipeline.runtime.pipeline:Pipeline",
    "prevent_deadlocks": "minidist.pipeline.deadlocks",
    "replica_reducers": "minidist.pipeline.runtime.replica_reducers",
    "saved_tensor": "minidist.nn.ops.in_place:SampledTensor",
    "shard_with_options": "minidist.parallel.fsdp_options",
    "special_sum": "minidist.collectives.call_checks",
    "trace": "minidist.base.traces:Trace",
    "validate_plan": "minidist.pipeline.validate:validate",
    "warn_without_gradient": "minidist.base.warn",
}
# Files of minidist/collectives that register no algorithm.
_NO_ALGORITHMS = (
    "algorithms",
    "auto",
    "call_checks",
    "closed_forms",
    "collective_check",
    "folding",
    "one_event",
    "reduction_order",
    "ring_event",
    "rooted",
    "summation_order",
    "tuning",
    "user_algorithms",
)
_LOADED: set[str] = set()  # packages whose files have been imported, or are being imported, by `_load_more`


def _module(hook: str, path: str) -> Callable[[], Any]:
    """Return what imports a module, and is replaced by what returns it at once."""

    def load() -> Any:
        module = import_module(path)
        setattr(hooks, hook, lambda: module)
        return module

    return load


def _function(hook: str, path: str, name: str) -> Callable[..., Any]:
    """Return what imports a function when it is called first, sets the hook to the function, and calls it."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        function = getattr(import_module(path), name)
        setattr(hooks, hook, function)
        return function(*arguments, **keywords)

    return call


def _choose(comm: Any, operation: str, nbytes: int) -> str:
    from minidist.collectives.auto import choose

    hooks.choosers["auto"] = choose
    return choose(comm, operation, nbytes)


def _load_more(registry: Any) -> bool:
    """Import the files that add entries to `registry`, once; return whether this call has imported them.

    registry: that of the schedules, or of the algorithms of a collective, in which a name was not found.
    """
    package = "minidist.pipeline.schedules" if registry.kind == "schedule" else "minidist.collectives"
    if package in _LOADED:
        return False

    # Noted first: what the files import looks at the table, too.
    _LOADED.add(package)
    from minidist.base.extras import import_modules

    import_modules(package, import_module(package).__path__, without=_NO_ALGORITHMS)
    return True


def _other_entry(registry: Any, name: str) -> Any:
    """Return the entry of a name that `registry` does not have: the algorithm that FILE.py:FUNCTION names.

    Raises UsageError for any other name, with the nearest one of the registry.
    """
    from minidist.base.user_file import is_user_function, without_function

    if registry.kind != "schedule" and is_user_function(name):
        from minidist.collectives.user_algorithms import load_algorithm

        return load_algorithm(name, registry.kind.removesuffix(" algorithm"))[1]
    if name.endswith(".py"):
        raise UsageError(without_function(name))
    hint = nearest(name.lower(), registry.aliases)
    raise UsageError(f"unknown {registry.kind} {quoted(name)}{hint}; there are {', '.join(sorted(registry))}")


@cache
def _kernels_of(kind: Any) -> Any:
    """Return the module that computes whole operations on arrays of a type, or None.

    kind: the class of an array. The module is meta_kernels.py for arrays without data and cuda.py for CuPy's; None
    stands for all others, on which the array functions themselves are called.
    """
    if getattr(kind, "is_meta", False):
        from minidist.base import meta_kernels

        return meta_kernels
    if kind.__module__.partition(".")[0] != "cupy":
        return None
    from minidist.base import cuda

    return cuda


def _optimizer_attribute(optimizer: Any, name: str) -> Any:
    if name not in ("state", "counts", "state_dict", "load_state_dict", "refresh"):
        return object.__getattribute__(optimizer, name)  # raises AttributeError
    from minidist.optim.state import attribute

    return attribute(optimizer, name)


def _plan(model: Any, sequence_parallel: bool) -> Any:
    """Return a plan that the core does not have, or None: of a GPT with experts or a split sequence, a Llama, an MLP.

    sequence_parallel: norms and dropout work on a part of the sequence. The plan maps patterns of module names to
    styles, see `parallelize_module`.
    """
    if sequence_parallel or hasattr(model, "config"):
        from minidist.parallel.expert.tensor_parallel import plan_of

        return plan_of(model, sequence_parallel)
    from minidist.parallel.tensor.gathering import mlp_plan_of

    return mlp_plan_of(model)


def _attention(name: str, comm: Any, length: int, inner: Any, neighbours: int) -> Any:
    """Return the attention of a split sequence; None for the core's, a ring in which each rank stands for itself.

    name: "ring", "all-gather", "ulysses" or "ulysses-ring"; UsageError for another. comm: the ranks that have the parts
    of the sequence. length: of the whole sequence, in tokens. inner: the attention function of a whole sequence, which
    "ulysses" calls. neighbours: how many ranks exchange heads in "ulysses-ring".
    """
    kinds: dict[str, tuple[str, str, tuple[Any, ...]]] = {
        "ring": ("ring_event", "RingAttentionEvent", ()),
        "all-gather": ("all_gather_attention", "AllGatherAttention", ()),
        "ulysses": ("ulysses", "UlyssesAttention", (inner,)),
        "ulysses-ring": ("ulysses_ring", "UlyssesRingAttention", (neighbours,)),
    }
    if name not in kinds:
        known = ", ".join(sorted(kinds))
        raise UsageError(f"unknown attention {quoted(name)}{nearest(name, kinds)}; there are {known}")
    if name == "ring" and not comm.world.folds:
        return None
    file, kind, more = kinds[name]
    return getattr(import_module(f"minidist.parallel.context.{file}"), kind)(comm, length, *more)


def _add_tensor_methods(tensor: Any) -> None:
    """Add methods that no model of the core uses to the class `Tensor`, which names them for type checkers."""
    method = partial(hooks.added, "tensor_methods")
    tensor.__neg__ = method("neg")
    tensor.__sub__ = method("sub")
    tensor.__rsub__ = method("rsub")
    tensor.__rtruediv__ = method("rtruediv")
    tensor.__pow__ = method("pow")
    tensor.__bool__ = method("bool")
    tensor.__iter__ = method("iter")
    tensor.__array__ = method("array")
    tensor.__array_function__ = method("array_function")
    tensor.exp = method("exp")
    tensor.log = method("log")
    tensor.max = method("max")
    tensor.relu = method("relu")
    tensor.sqrt = method("sqrt")
    tensor.tanh = method("tanh")
    tensor.transpose = method("transpose")
    tensor.detach = method("detach")
    tensor.astype = method("astype")
    tensor.__reduce_ex__ = method("reduce_ex")


def _named_mean(loss: Any, over: str) -> Any:
    """Note in the node of a loss over what it is a mean, such as "22 rows", and return the loss."""
    if over[:1] == "0":
        from minidist.base.warn import warn_of_no_rows

        warn_of_no_rows(over)
    if loss.node is not None:
        loss.node.over = over
    return loss


for _name, _path in MODULES.items():
    setattr(hooks, _name, _module(_name, _path))
for _name, _path in FUNCTIONS.items():
    _file, _, _other = _path.partition(":")
    setattr(hooks, _name, _function(_name, _file, _other or _name))
hooks.add_tensor_methods = _add_tensor_methods
hooks.named_mean = _named_mean
hooks.choosers["auto"] = _choose
hooks.read_by_others = 64 * 1024
hooks.quoted = quoted
hooks.load_more = _load_more
hooks.other_entry = _other_entry
hooks.plan_of = _plan
hooks.split_attention = _attention
hooks.kernels_of = _kernels_of
hooks.optimizer_attribute = _optimizer_attribute
