"""What all optimizers share: slices of parameters, the loop over them in blocks, groups, step counter and state.

    slices | w0 | w1 | w2 |   data, gradient and state, block by block of 64 K elements: a block stays in the cache
           └─ one run ────┘   while all arithmetic passes over it, and the temporaries are one block large

A strategy decides which elements a rank updates: all of them (data parallel), 1/N of them (ZeRO), those of its stage
(pipelines). An update treats every element alone, so any cut gives the same bits, and nothing here sends anything. Each
slice has `.name`, `.data` and `.grad`, two arrays of one dtype and equal size; the optimizer reads them anew at each
step, because a strategy may bind other arrays. A `.grad` of None is skipped.

For half-precision parameters the state holds a float32 copy, "master", which is updated; the parameter is the master,
downcast. With Adam that makes 2 + 2 + 12 bytes per parameter: itself, its gradient, and master, m and v (Micikevicius
et al., "Mixed precision training", 2018, section 3.1; Rajbhandari et al., "ZeRO", 2020, section 3.1).

Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.trace import track

BLOCK = 65536  # elements
MASTER = "master"  # the state that is the float32 copy of half-precision parameters

State = dict[str, xp.Array]
Setting = Callable[[str, Any], Any]

# Elements: shards begin at multiples, so that the norm of a gradient has the same bits however it is cut.
NORM_BLOCK = 1024


@dataclass(frozen=True)
class FlatSlice:
    """Elements [start, stop) of `source.data` and `source.grad`, the 1-D arrays of a `FlatParameters` or of a shard.

    parameter: whose elements they are; `source.have_grad` says whether it has a gradient now.
    """

    source: Any
    start: int
    stop: int
    name: str
    parameter: Any = None

    @property
    def data(self) -> xp.Array:
        """A view of the data."""
        return self.source.data[self.start : self.stop]  # type: ignore[no-any-return]

    @property
    def grad(self) -> xp.Array | None:
        """A view of the gradient; None when the source has none now."""
        grad = self.source.grad
        return None if grad is None else grad[self.start : self.stop]


def flat_slices(flat: Any, start: int = 0, stop: int | None = None, source: Any = None) -> list[FlatSlice]:
    """Return the parameters of `flat` inside its elements [start, stop), one slice each; frozen ones are left out.

    flat: has `names`, `offsets` (one more) and `parameters` with `requires_grad`, as `FlatParameters` has.
    source: where `.data` and `.grad` are read, when they hold the elements [start, stop) alone (a shard); else `flat`.
    """
    # A shard's arrays begin at 0, where the whole ones have `start`.
    stop = flat.offsets[-1] if stop is None else stop
    shift = 0 if source is None else start
    slices = []
    for parameter, name, (begin, end) in zip(flat.parameters, flat.names, pairwise(flat.offsets), strict=True):
        # The part of this parameter that lies in the range; empty when it lies outside.
        begin, end = max(begin, start), min(end, stop)
        if begin < end and parameter.requires_grad:
            slices.append(FlatSlice(flat if source is None else source, begin - shift, end - shift, name, parameter))
    return slices


def as_slices(parameters: Any) -> Iterator[Any]:
    """Yield the slices in a `FlatParameters`, a slice, a parameter, or an iterable of these, without frozen ones."""
    if hasattr(parameters, "offsets"):
        yield from flat_slices(parameters)
    elif hasattr(parameters, "data") and hasattr(parameters, "grad"):
        if getattr(parameters, "requires_grad", True):
            yield parameters
    elif isinstance(parameters, Iterable) and not isinstance(parameters, str):
        for piece in parameters:
            yield from as_slices(piece)
    else:
        hooks.optimizer_checks().refuse_parameters(parameters)


def have_gradient(source: Any, parameters: Sequence[Any]) -> list[bool]:
    """Return which of the parameters of `source`, the source of a slice, have a gradient; [None] is `source` itself."""
    if hasattr(source, "have_grad") and parameters[0] is not None:
        return source.have_grad(parameters)  # type: ignore[no-any-return]
    # A parameter may lie in a flat array, which knows more of its gradient.
    flat = None if hasattr(source, "have_grad") else getattr(source, "flat", None)
    return [source.grad is not None] * len(parameters) if flat is None else flat.have_grad([source])


@dataclass(frozen=True)
class Group:
    """Settings for the parameters whose qualified name `matches`: `lr` times `lr_scale`, and another weight decay."""

    matches: Callable[[str], bool]
    lr_scale: float = 1.0
    weight_decay: float | None = None  # None: the optimizer's

    def __post_init__(self) -> None:
        hooks.optimizer_checks().check_group(self)


@dataclass
class _Run:
    """Neighbouring slices of one source and one group, updated together, which have had equally many steps.

    pieces: (name, start, stop) in the run. parameters: of the pieces, where the source has several. count: of steps.
    """

    slice: Any
    group: Group
    pieces: list[tuple[str, int, int]]
    parameters: list[Any]
    state: State | None = None
    count: int = 0


class Optimizer:
    """Base class of all optimizers; a subclass defines `initial_state` and `update`.

    parameters: a `FlatParameters`, slices, parameters, or an iterable of any of these.
    lr: the base learning rate; `lr_factor` multiplies it and is what a schedule sets before each step.
    groups: the first group that matches a parameter's name applies to it.
    grad_scale: multiplies gradients while the next step reads them, and is 1 again afterwards: 1 / loss scale times the
    clip coefficient, for half-precision gradients, which would lose bits if they were scaled in place.
    step_count: of steps in which any parameter had a gradient. A parameter without one is not stepped, and `update`
    gets the number of steps that the parameter itself has had, as in PyTorch.
    settings: name -> check(name, value), which returns the value to keep; called whenever the setting is set. All ranks
    must have the same.
    Raises UsageError for a name that occurs twice, for gradients of another dtype or shape, for a wrong state.
    """

    temporaries = 1
    joins = True  # may neighbouring parameters be updated as one array?
    settings: ClassVar[dict[str, Setting]] = dict.fromkeys(("lr", "lr_factor", "weight_decay"), hooks.checked_setting)

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0, groups: Iterable[Group] = ()) -> None:
        self.lr = lr
        self.lr_factor = 1.0
        self.grad_scale = 1.0
        self.weight_decay = weight_decay
        self.groups = [*groups, Group(bool)]  # bool(name) is True for every name
        self.step_count = 0
        self._runs: list[_Run] = []
        self._work: dict[Any, list[xp.Array]] = {}

        # State is kept by name, so a name may occur once only.
        pieces = [(getattr(piece, "name", "") or str(i), piece) for i, piece in enumerate(as_slices(parameters))]
        hooks.optimizer_checks().check_names([name for name, _ in pieces])
        for name, piece in pieces:
            self._add(piece, name)

    def __setattr__(self, name: str, value: Any) -> None:
        check = self.settings.get(name)
        super().__setattr__(name, value if check is None else check(name, value))

    def _add(self, piece: Any, name: str) -> None:
        """Append a slice; one that continues the last run joins it, so that both are updated as one array."""
        # The last group matches every name, so there always is one.
        group = next(group for group in self.groups if group.matches(name))
        is_flat = isinstance(piece, FlatSlice)
        size = piece.stop - piece.start if is_flat else piece.data.size
        last = self._runs[-1] if is_flat and self.joins and self._runs else None
        in_same_array = last is not None and getattr(last.slice, "source", None) is piece.source
        if last is not None and in_same_array and last.slice.stop == piece.start and last.group is group:
            start = last.slice.start
            last.slice = replace(last.slice, stop=piece.stop)
            last.pieces.append((name, piece.start - start, piece.stop - start))
            last.parameters.append(piece.parameter)
        else:
            self._runs.append(_Run(piece, group, [(name, 0, size)], [getattr(piece, "parameter", None)]))

    def initial_state(self) -> dict[str, float]:
        """Return the names of the state arrays of each parameter, and the value each starts with."""
        return {}

    def initial_state_of(self, name: str) -> dict[str, float]:
        """Return `initial_state` of one parameter, for an optimizer that treats parameters differently."""
        return self.initial_state()

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        """Update one block in place: 1-D arrays of one length; `work` has `temporaries` more, to overwrite.

        `grad` must not be changed. `count` is t of the papers: 1 in the first step of these elements.
        """
        raise NotImplementedError

    def step(self) -> None:
        """Update every parameter that has a gradient, then call `updated()` of their owners."""
        # Gradients that are not those of all ranks are refused before anything changes.
        hooks.optimizer_checks().check_reduced(self._runs)

        runs, sources = self._with_gradient()
        if not sources and not self.step_count:
            hooks.warn_without_gradient(type(self).__name__)
        self.step_count += bool(sources)
        for run in runs:
            run.count += 1
        self._step_runs(runs)

        # Each owner (flat parameters, a shard) hears once that its data have changed, however many slices it has; and
        # what ranks with replicas compare when they reduce the next gradient, before grad_scale is 1 again.
        described = hooks.describe_step(self)
        self.grad_scale = 1.0
        for owner in sources.values():
            if hasattr(owner, "updated"):
                owner.updated(described)

    def _with_gradient(self) -> tuple[list[_Run], dict[int, Any]]:
        """Return the runs that have a gradient, and the sources that have one, also on other ranks, by their `id`.

        A run is cut first when only some of its parameters have a gradient (optim/runs.py).
        """
        runs: list[_Run] = []
        ready: list[_Run] = []
        sources: dict[int, Any] = {}
        for run in self._runs:
            source = getattr(run.slice, "source", run.slice)  # the flat array or shard in which it lies
            have = have_gradient(source, run.parameters)
            parts = [run] if have.count(have[0]) == len(have) else hooks.cut_run(run, have)
            runs += parts
            # Neighbours differ, so that every second part has a gradient.
            ready += parts[not have[0] :: 2]
            # All ranks with shards of a source count its steps, also those whose part of it has no gradient.
            if any(have) or getattr(source, "used", None):
                sources[id(source)] = source
        self._runs = runs
        return ready, sources

    def _step_runs(self, runs: list[_Run]) -> None:
        """Update runs whose parameters all have a gradient."""
        for run in runs:
            self._each_block(run, self.update)

    def _each_block(self, run: _Run, function: Callable[..., None], lr_scale: float = 1.0) -> None:
        """Call `function` (`update`, or one like it) for each block of a run.

        lr_scale: multiplies the learning rate that `function` gets.
        """
        data, grad = run.slice.data, run.slice.grad
        hooks.optimizer_checks().check_run(run, data, grad, self.state_names(data.dtype, run.pieces[0][0]))

        # Settings and arrays of the whole run.
        data, grad = data.reshape(-1), grad.reshape(-1)
        state = self._make_state(run, data) if run.state is None else run.state
        # Temporaries of one block, made once for each dtype and used by every run.
        dtype, size = computing(data.dtype), min(data.size, xp.block_length(data, BLOCK))
        work = self._work.get(dtype)
        if work is None or (work and work[0].size < size):
            work = [track(xp.empty(size, dtype, data), "workspace") for _ in range(self.temporaries)]
            self._work[dtype] = work
        lr = float(self.lr * self.lr_factor * run.group.lr_scale * lr_scale)  # a NumPy scalar would promote
        decay = self._decay_of(run)
        # What is updated: the parameter itself, or in half precision its float32 master.
        values = state.get(MASTER, data)

        # Block by block, so that all arithmetic finds its data in the cache.
        for block in xp.blocks(data, BLOCK):
            parts = {name: array[block] for name, array in state.items() if name != MASTER}
            # The gradient in float32; the loss scale and the clip coefficient are multiplied in here, not in place.
            gradient = xp.upcast(grad[block])
            if self.grad_scale != 1.0:
                gradient = gradient * float(self.grad_scale)
            temporaries = [array[: block.stop - block.start] for array in work]
            function(values[block], gradient, parts, temporaries, lr, decay, run.count)
            if values is not data:
                data[block] = xp.downcast(values[block], data.dtype)

    def _decay_of(self, run: _Run) -> float:
        """Return the weight decay of a run's group."""
        return float(self.weight_decay if run.group.weight_decay is None else run.group.weight_decay)

    def state_names(self, dtype: Any, name: str) -> list[str]:
        """Return the names of the state arrays of parameter `name` of `dtype`; half precision has the master, too."""
        return [*([MASTER] if xp.is_half(dtype) else []), *self.initial_state_of(name)]

    def _make_state(self, run: _Run, data: xp.Array) -> State:
        # The master begins as the parameter itself; all other state begins as one number.
        run.state, dtype = {}, computing(data.dtype)
        if xp.is_half(data.dtype):
            run.state[MASTER] = track(data.astype(dtype), "optimizer")
        for name, value in self.initial_state_of(run.pieces[0][0]).items():
            run.state[name] = track(xp.full(data.size, value, dtype, data), "optimizer")
        return run.state

    def __getattr__(self, name: str) -> Any:
        # What the core does without: `state`, `counts`, `state_dict()`, `load_state_dict(saved)` and `refresh()`.
        return hooks.optimizer_attribute(self, name)


def computing(dtype: Any) -> Any:
    """Return the dtype of an update: float32 for half-precision parameters."""
    return xp.dtype(xp.float32) if xp.is_half(dtype) else dtype
