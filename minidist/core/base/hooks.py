"""Tables that are empty and functions that do nothing, until a library sets them to add to what the core does.

    calls.py    algorithm="auto"  ──▶  choosers["auto"](comm, "all_reduce", 4096)  ──▶  "recursive_doubling"
    module.py   print(model)      ──▶  describe(model)  ──▶  the text

The core calls what it finds here, and runs without any of it; `minidist/additions.py` sets what this package adds.

Proved by: tests/base/test_hooks.py
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

from minidist.core.base.errors import UsageError, quoted

# Names that stand for a choice among algorithms: (comm, operation, bytes of the whole array) -> the algorithm's name.
choosers: dict[str, Callable[[Any, str, int], str]] = {}
# Each looks at a graph before backward visits it: (pass, root node, gradient of its output).
backward_checks: list[Callable[[Any, Any, Any], None]] = []


class _NoChecks:
    """A module of checks that checks nothing, and a trace that records nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what a trace takes."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, and return None."""


def _unchanged(value: Any, function: Any) -> Any:
    return value


def _none(_: Any) -> dict[Any, Any]:
    return {}


def _any_place(*_: Any) -> AbstractContextManager[Any]:
    return nullcontext()


def _no_entry(registry: Any, name: str) -> Any:
    raise UsageError(f"unknown {registry.kind} {quoted(name)}; there are {', '.join(sorted(registry))}")


def _as_given(name: str, value: Any, *_: Any, **__: Any) -> Any:
    return value


def added(library: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of the module that the hook `library` gives, which is imported when it is called."""

    def method(*arguments: Any, **keywords: Any) -> Any:
        return getattr(globals()[library](), name)(*arguments, **keywords)

    method.__name__, method.__doc__ = name, f"`{name}` of the module that minidist/additions.py names for {library}."
    return method


class _NoDropout:
    """Dropout that drops nothing; heads: those of an attention whose weights it would drop."""

    active = False

    def __init__(self, p: float, heads: int = 0) -> None:
        self.heads = heads
        if p:
            _not_in_the_core()

    def __call__(self, x: Any) -> Any:
        return x

    def part(self, rank: int, ranks: int) -> Any:
        return self


def _not_in_the_core(*_: Any) -> Any:
    raise UsageError(
        "minidist/core has no half precision, devices, loading of weights, receives from any rank or further options of"
        " its wrappers; import all of minidist"
    )


# Modules of the library: what each refuses, or what the core does without. `additions.MODULES` says where they are.
comm_checks: Callable[[], Any] = _NoChecks  # a mesh, a cost model and a wrapper
operation_checks: Callable[[], Any] = _NoChecks  # operations, losses and parameters
optimizer_checks: Callable[[], Any] = _NoChecks
pipeline_refusals: Callable[[], Any] = _NoChecks
refusals: Callable[[], Any] = _NoChecks  # a module and its call
wrong_arguments: Callable[[], Any] = _NoChecks  # why a call has failed
fibers: Callable[[], Any] = _not_in_the_core  # the backend of fibers.py where there is no greenlet
half: Callable[[], Any] = _not_in_the_core  # conversions and sums of 16-bit floats
precision: Callable[[], Any] = _not_in_the_core  # operands in half precision
module_methods: Callable[[], Any] = _not_in_the_core
one_event: Callable[[], Any] = _not_in_the_core  # calls in which one rank stands for many
tensor_methods: Callable[[], Any] = _not_in_the_core

# Looks at a call of a collective before it is made: (comm, operation, array, and where they are given op, out, root,
# counts and equal) -> what must be equal on both sides of its messages.
check_call: Callable[..., Any] = _nothing
# (registry) -> whether more entries were registered now: called when a name is none of those that are there.
load_more: Callable[[Any], Any] = _nothing
# (registry, name that no entry has) -> an entry that the name describes; UsageError for any other name.
other_entry: Callable[[Any, str], Any] = _no_entry
# The type of arrays that are not NumPy's -> the module of whole operations on them, or None.
kernels_of: Callable[[type], Any] = _nothing
# (op, first, second, out) -> whether it has stored first (op) second in out: asked for 16-bit floats and integers, and
# for arrays of more bytes than `read_by_others`: other cores read longer messages out of the array, shorter as copies.
special_sum: Callable[[str, Any, Any, Any], Any] = _nothing
read_by_others = inf
# (tensor, version, array) -> what a node keeps of a parameter or an input in place of a `SavedTensor`.
saved_tensor: Callable[[Any, int, Any], Any] | None = None
# The classes of minidist/nn/dropout.py: of elements with a probability, and of weights of attention with a head count.
dropout: Callable[[float], Any] = _NoDropout
attention_dropout: Callable[[float, int], Any] = _NoDropout
# (step, first row, seed, positions, length of a text) -> a context in which draws depend on the place in the batch.
batch_coordinates: Callable[..., AbstractContextManager[Any]] = _any_place
# (dropout, samples, heads, length) -> a function that drops weights of attention (`Drop` of attention.py).
dropped_weights: Callable[[Any, int, int, int], Any] = _not_in_the_core
# (object, function) -> the object, or a shallow copy with its tensors replaced.
map_object: Callable[[Any, Callable[[Any], Any]], Any] = _unchanged
# (name, value) -> the value of an optimizer's setting as it is kept.
checked_setting: Callable[[str, Any], Any] = _as_given
# (name, value, range of it) -> the number as it is kept; UsageError for what is none, or lies outside.
check_number: Callable[..., Any] = _as_given
check_whole: Callable[..., Any] = _as_given
# (number, things, ranks, kind of ranks, perhaps blocks and a remedy): UsageError with the nearest numbers that work,
# where the things cannot be divided among the ranks.
check_divisible: Callable[..., None] = _nothing
# (operation, module, communicator, perhaps a plan) -> None: compares the weights of a model that is to be split.
check_weights: Callable[..., None] = _nothing
# (op, communicators over which gradients are summed) -> the `Guard` of a wrapper of a model, or None.
guard: Callable[..., Any] = _nothing
# (model, sequence_parallel) -> its tensor-parallel plan, or None for a model that is not known.
plan_of: Callable[[Any, bool], Any] = _nothing
# (rank, number of ranks) -> the record of what a simulated rank does.
trace: Callable[..., Any] = _NoChecks
# An optimizer -> what ranks compare of its step, an object whose text is one line.
describe_step: Callable[[Any], Any] = _nothing
# (run of an optimizer, whether each parameter has a gradient) -> runs whose parameters all have one, or none has.
cut_run: Callable[[Any, list[Any]], list[Any]] = _not_in_the_core
# (optimizer, name) -> an attribute that the core does without; AttributeError for any other.
optimizer_attribute: Callable[[Any, str], Any] = object.__getattribute__
# A module of a model -> the text that `print` shows.
describe: Callable[[Any], str] = object.__repr__
# Attention of split sequences: (name, comm, tokens of a sequence, the model's attention so far, neighbours that
# exchange heads) -> the module that takes the place of every `attention_fn`, or None for ring attention.
split_attention: Callable[[str, Any, int, Any, int], Any] = _nothing
# (layout, communicator): UsageError where the degrees of `ParallelDims` do not fit the ranks.
check_layout: Callable[[Any, Any], None] = _nothing
# (schedule, stages, microbatches, chunks, options): UsageError for what a schedule cannot have.
check_schedule: Callable[..., None] = _nothing
# (plan, allow_wrong_gradients): PlanError for a plan that cannot be executed, or whose result would be wrong.
validate_plan: Callable[[Any, bool], Any] = _nothing
# (plan with transfers, its orders, (stage, micro-batch) -> rank): posts receives earlier where a send would block.
prevent_deadlocks: Callable[[Any, Any, Any], None] = _nothing
# (messages of a pipeline) -> item of the rank's order -> what was sent and has arrived when it is done.
arrived_messages: Callable[[Any], dict[int, list[Any]]] = _none
# (module, mesh, settings of `fully_shard`, options): shards a module in a way that the core does not know.
shard_with_options: Callable[..., None] = _not_in_the_core
# (flat parameters by stage, communicator, algorithm) -> by stage what sums their gradients over replicas.
replica_reducers: Callable[..., Any] = _not_in_the_core
# (stages by number, communicator, its ranks that compute each stage, data axis) -> what combines the running statistics
# of their layers after a step.
combine_statistics: Callable[..., list[Callable[[], None]] | None] = _nothing
warn_of_no_rows: Callable[[str], None] = _nothing  # ("0 rows"): of a mean over nothing
warn_without_gradient: Callable[[str], None] = _nothing  # (class of an optimizer): of its first step
