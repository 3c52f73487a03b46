"""A parameter is a leaf that outlives the graph: its array may be replaced between forward and backward, and the
buffer of its gradient may be a slice of a larger array.

FSDP frees and gathers parameters, a pipeline stashes older versions, an optimizer updates them. A node therefore keeps
the Parameter, never the array. `version` counts the updates: with minidist/nn/ops/in_place.py, backward raises an error
when the version is not the one that forward used.

    backward ──▶ accumulate ──▶ gradient.local, which lies in its buffer, perhaps a slice of a flat array

Proved by: tests/autograd/test_backward.py, tests/autograd/test_in_place.py, tests/parallel/test_reduced_gradients.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from minidist.core.autograd.tensor import Tensor, contribution_recorder, into_buffer
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import AutogradError, ShapeError
from minidist.core.base.layout import Layout
from minidist.core.base.trace import track, watchers


@dataclass(slots=True, eq=False)
class Gradient:
    """The gradient of one parameter as two summands: what this rank added, and what is already summed over ranks.

        accumulate()   local = what backward passes contributed since the last reduction
        was_reduced()  total = local, which a reduction has just replaced by the sum over ranks, + the total before
        value          local + total, where None counts nothing

    So a second backward pass may follow a reduction: only what is new is summed over ranks again. The first summand
    lies in the buffer; a total moves to a separate array when local contributions follow it.
    """

    buffer: Any = None  # the memory, perhaps a slice of a flat array; its values mean nothing
    local: xp.Array | None = None  # the buffer, or None: nothing was added since the last reduction
    total: xp.Array | None = None

    @property
    def value(self) -> xp.Array | None:
        """The whole gradient: the array of the only summand, a new array for two, None without any."""
        if self.local is None or self.total is None:
            return self.local if self.total is None else self.total
        return self.local + self.total

    def was_reduced(self) -> None:
        """Note that a reduction has replaced `local` by its sum over ranks: it becomes part of `total`."""
        if self.local is not None:
            if self.total is not None:
                self.local += self.total
            self.local, self.total = None, self.local

    def clear(self) -> None:
        """Forget both summands. The buffer stays, and what is added next overwrites it."""
        self.local = self.total = None

    def release(self) -> None:
        """Forget both summands and the buffer."""
        self.buffer = self.local = self.total = None


class BackwardObserver:
    """What a strategy learns of a backward pass. Every method may be left out.

    An observer joins a pass when it is given to `backward`, attached by a `backward_hook`, or registered on a parameter
    that becomes ready. It is told of ready parameters on which it is registered (of all, when given to `backward`).
    """

    def started(self) -> None:
        """Called when the observer joins a pass, before anything else."""

    def parameter_ready(self, parameter: "Parameter") -> None:
        """Called right after the last contribution to `parameter` was added."""

    def node_done(self) -> None:
        """Called after each visited node; the place to let communication progress."""

    def finished(self) -> None:
        """Called when the pass has visited every node; not when an error ends it."""

    def weights_done(self) -> None:
        """Called when the weight gradients that the pass deferred have been computed."""


class Parameter(Tensor):
    """A leaf tensor that a model trains.

    shape, dtype: known also while the data is released. name: qualified name, set by the module tree.
    version: number of updates so far; that of the `FlatParameters` when one owns the parameter.
    gradient: its summands; `grad` reads and sets their sum.
    init: (law, scale) of the initial values, see base.random.initial_weight. layout: how it lies over a mesh, or None.
    flat: the FlatParameters that owns the storage. observers: of every pass that makes this parameter ready.
    """

    __slots__ = (
        "_data",
        "_requires_grad",
        "_version",
        "dtype",
        "flat",
        "gradient",
        "init",
        "layout",
        "name",
        "observers",
        "ready_hooks",
        "shape",
    )

    shape: tuple[int, ...]
    dtype: Any

    def __init__(
        self, data: Any, requires_grad: bool = True, name: str = "", init: tuple[str, float] | None = None
    ) -> None:
        self._data: xp.Array | None = track(xp.as_array(data), "parameter")
        self.shape = self._data.shape
        self.dtype = self._data.dtype
        self.name = name
        self.requires_grad = requires_grad
        self.gradient = Gradient()
        self._version = 0
        self.flat: Any = None
        self.ready_hooks: list[Callable[[Parameter], None]] = []
        self.observers: list[BackwardObserver] = []
        self.layout: Layout | None = None
        self.init = init

    @property
    def data(self) -> xp.Array:
        """The array now bound; an error while the parameter is released."""
        if self._data is None:
            raise hooks.operation_checks().released(self) or AutogradError(f"parameter {self.name!r} is released")
        for watcher in watchers.get():
            watcher.parameter_read(self)
        return self._data

    @data.setter
    def data(self, value: xp.Array) -> None:
        if value.shape != self.shape:
            raise ShapeError(f"parameter {self.name!r} has shape {self.shape}; cannot bind data of shape {value.shape}")
        if self.flat is None:
            self.bind(value)
        else:
            hooks.operation_checks().check_values(self, value)
            xp.copyto(self.data, value)  # it stays a view of the flat array
        self.updated()

    def bind(self, array: xp.Array) -> None:
        """Let `array` itself, without a copy, be the data; for the owner of the storage."""
        self._data, self.dtype = array, array.dtype

    def release(self) -> None:
        """Let go of the data, so that its memory can be freed; reading it is an error until `bind`."""
        self._data = None

    @property
    def node(self) -> Any:
        """The parameter is its own leaf in the graph; None when it is frozen."""
        return self if self._requires_grad else None

    @property
    def requires_grad(self) -> bool:
        """False for a frozen parameter: it gets no gradient."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and self.dtype.kind in "biu":
            hooks.operation_checks().refuse_integers(self)
        self._requires_grad = value

    @property
    def size(self) -> int:  # type: ignore[override]
        """Number of elements, also while the data is released."""
        return prod(self.shape)

    @property
    def version(self) -> int:
        """Number of updates of the values now bound."""
        return self._version if self.flat is None else self.flat.version

    def updated(self, by: Any = None) -> None:
        """Say that the values changed: nodes recorded before may no longer run their backward.

        by: what an optimizer's step says of itself, see `FlatParameters.updated`.
        """
        if self.flat is None:
            self._version += 1
        else:
            self.flat.updated(by)

    def saved(self) -> Any:
        """What a node keeps: the parameter, never its array; `hooks.saved_tensor` may add the version and a sample."""
        return hooks.saved_tensor(self, self.version, self._data) or self

    @property
    def grad(self) -> xp.Array | None:
        """The gradient; None before the first contribution since `zero_grad`, and always when frozen."""
        return self.gradient.value if self._requires_grad else None

    @grad.setter
    def grad(self, value: xp.Array | None) -> None:
        if value is None:
            self.zero_grad()
            return
        self._check(value)
        self.gradient.clear()
        self.gradient.local = local = self._buffer()
        xp.copyto(local, value)

    def zero_grad(self) -> None:
        """Forget the gradient, also what a shard holds of it. Nothing is cleared: the next contribution overwrites."""
        self.gradient.clear()
        if self.flat is not None and self.flat.shard is not None:
            self.flat.shard.forget(self)

    def zero_fill(self) -> None:
        """Make a gradient without local contributions zeros (an unused parameter that takes part in a reduction)."""
        if self.gradient.local is None:
            self.gradient.local = local = self._buffer()
            local.fill(0)

    def accumulate(self, contribution: Any) -> None:
        """Add one contribution: an array of this shape, or a function compute(out) that returns it, in `out` if given.

        The first one is written straight into the buffer; a later one is computed whole and then added. With a
        `contribution_recorder` set, the recorder gets it as a separate array, and the gradient stays as it is.
        """
        if not callable(contribution):
            contribution = partial(into_buffer(None), self._check(contribution))
        recorder, local = contribution_recorder.get(), self.gradient.local
        if recorder is not None:
            recorder(self, self._check(contribution(None)))
        elif local is not None:
            xp.add_into(local, self._check(contribution(None)))
        else:
            local = self._buffer()
            contribution(local)
            self.gradient.local = local

    def _buffer(self) -> Any:
        """Return the buffer, free for local contributions: a total that lies in it moves to a separate array."""
        gradient = self.gradient
        if gradient.buffer is None:
            if self.flat is None:
                gradient.buffer = track(xp.empty(self.shape, self.dtype, self._data), "gradient")
            else:
                self.flat.make_grad_of(self)  # binds the buffers of its neighbours too
        if gradient.total is gradient.buffer:
            gradient.total = track(xp.array(gradient.total), "gradient")
        return gradient.buffer

    def _check(self, value: xp.Array) -> xp.Array:
        if value.shape != self.shape:
            raise ShapeError(
                f"gradient of parameter {self.name!r} has shape {value.shape}; the parameter has {self.shape}"
            )
        return value

    def register_post_accumulate_grad_hook(self, hook: "Callable[[Parameter], None]") -> Callable[[], None]:
        """Call hook(parameter) in each backward pass after the parameter's last contribution. Returns a remover."""
        self.ready_hooks.append(hook)
        return lambda: self.ready_hooks.remove(hook)

    def __repr__(self) -> str:
        state = "released" if self._data is None else repr(self._data)
        return f"Parameter({self.name!r}, {state})"
