"""A parameter is a leaf that outlives the graph: its array may be rebound between forward and backward, and its
gradient has a buffer that it may share with others.

FSDP frees and gathers parameters, a pipeline stashes older versions, an optimizer updates them. A node therefore keeps
the Parameter and the `version` that it saw in forward, never the array, and backward refuses to use another version.

Gradients enter through one method, `accumulate`. The first contribution since `zero_grad` is written straight into the
buffer; a later one is computed whole into a temporary array and then added. So the bits depend on the order of the
contributions and on nothing else.
"""

from collections.abc import Callable
from typing import Any

from minidist.autograd.errors import AutogradError, DtypeError, ShapeError, VersionError
from minidist.autograd.modes import contribution_recorder, parameter_reads
from minidist.autograd.node import Node
from minidist.autograd.tensor import Tensor
from minidist.base import arrays as xp
from minidist.base.half import add_into
from minidist.base.layout import Layout
from minidist.base.memory import track


class Parameter(Tensor):
    """A leaf tensor that a model trains.

    name: qualified name, set by the module tree; used in errors and as the key of random draws.
    version: number of updates so far; belongs to the `FlatParameters` when one owns the parameter.
    contributions: how many have arrived since `zero_grad`.
    """

    __slots__ = (
        "_data",
        "_dtype",
        "_grad",
        "_requires_grad",
        "_shape",
        "_version",
        "contributions",
        "flat",
        "init",
        "layout",
        "name",
        "ready_hooks",
        "reduced",
        "settled",
        "stale",
    )

    def __init__(
        self, data: Any, requires_grad: bool = True, name: str = "", init: tuple[str, float] | None = None
    ) -> None:
        self._data = track(xp.as_array(data), "parameter")
        self._shape = self._data.shape
        self._dtype = self._data.dtype
        self.name = name
        self.requires_grad = requires_grad
        self._grad: xp.Array | None = None
        self._version = 0
        self.flat: Any = None  # the FlatParameters that owns the storage
        self.contributions = 0
        self.stale = True  # the buffer (if any) holds values from before zero_grad
        self.reduced = False  # is the gradient a sum over ranks, which what comes next must not be mixed into?
        self.settled: xp.Array | None = None  # such a sum, while later contributions are collected
        self.ready_hooks: list[Callable[[Parameter], None]] = []
        self.layout: Layout | None = None  # how it lies over a mesh; None: nobody has cut anything
        self.init = init  # (law, scale) of the initial values, see base.random.initial_weight

    # --- values ---

    @property
    def data(self) -> xp.Array:  # type: ignore[override]
        """The array now bound; an error while the parameter is released."""
        if self._data is None:
            raise AutogradError(
                f"parameter {self.name!r} of shape {self._shape} is released: its unit has no data bound; "
                "gather the unit (bind) before it computes"
            )
        reads = parameter_reads.get()
        if reads is not None:
            reads.append(self)
        return self._data

    @data.setter
    def data(self, value: xp.Array) -> None:
        if value.shape != self._shape:
            raise ShapeError(
                f"parameter {self.name!r} has shape {self._shape}; cannot bind data of shape {value.shape}"
            )
        if self.flat is None:
            self.bind(value)
            return
        if value.dtype != self._dtype:
            raise DtypeError(
                f"parameter {self.name!r} is {self._dtype} in a flat array; cannot assign data of {value.dtype}"
            )
        xp.copyto(self.data, value)  # it stays a view of the flat array

    def bind(self, array: xp.Array) -> None:
        """Let `array` itself, without a copy, be the data; for the owner of the storage."""
        self._data, self._dtype = array, array.dtype

    @property
    def node(self) -> Any:  # type: ignore[override]
        """The parameter is its own leaf in the graph; None when it is frozen."""
        return self if self._requires_grad else None

    @property
    def requires_grad(self) -> bool:
        """False for a frozen parameter: it gets no gradient."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and self._dtype.kind in "biu":
            raise DtypeError(
                f"parameter {self.name!r} is {self._dtype}: only floats have gradients; use requires_grad=False, or"
                " cast it"
            )
        self._requires_grad = value

    @property
    def is_leaf(self) -> bool:
        """Always."""
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, also while the data is released."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype, also while the data is released."""
        return self._dtype

    @property
    def size(self) -> int:
        """Number of elements, also while the data is released."""
        count = 1
        for length in self._shape:
            count *= length
        return count

    @property
    def version(self) -> int:
        """Number of updates of the values now bound."""
        return self._version if self.flat is None else self.flat.version

    def updated(self) -> None:
        """Say that the values changed: nodes recorded before may no longer run their backward."""
        if self.flat is None:
            self._version += 1
        else:
            self.flat.updated()

    def saved(self) -> "ParameterUse":
        """What a node keeps: the parameter and the version, never the array."""
        return ParameterUse(self, self.version)

    # --- gradient ---

    @property
    def grad(self) -> xp.Array | None:
        """The gradient; None before the first contribution since `zero_grad`, and always when frozen.

        While contributions wait for a reduction after an earlier one, this is a new array, the sum of both.
        """
        if not self._requires_grad:
            return None
        if self.stale:
            return self.settled
        return self._grad if self.settled is None else self._grad + self.settled

    @grad.setter
    def grad(self, value: xp.Array | None) -> None:
        if value is None:
            self.zero_grad()
            return
        xp.copyto(self._buffer(), self._check(value))
        self.stale, self.settled = False, None
        self.contributions = max(self.contributions, 1)

    @property
    def since_reduction(self) -> xp.Array | None:
        """The part of the gradient that is not summed over ranks yet, the buffer itself; None when there is none."""
        return None if self.stale or self.reduced else self._grad

    def zero_grad(self) -> None:
        """Forget the gradient, also what a shard holds of it. No buffer is cleared: the next contribution overwrites
        it.
        """
        self.forget()
        if self.flat is not None and self.flat.shard is not None:
            self.flat.shard.forget(self)

    def forget(self) -> None:
        """Forget what is in this parameter's own buffer; a shard keeps what was reduced."""
        self.contributions = 0
        self.stale, self.reduced, self.settled = True, False, None

    def settle(self) -> None:
        """Set aside a gradient that is a sum over ranks, so that what comes next can be summed apart from it."""
        if self.reduced:
            kept = track(xp.array(self._grad), "gradient")
            self.forget()
            self.settled = kept

    def mark_reduced(self) -> None:
        """The gradient is a sum over ranks now: add what was set aside. The next contribution will set it aside again."""
        if self.settled is not None:
            if self.stale:
                xp.copyto(self._buffer(), self.settled)
            else:
                self._grad += self.settled
        self.stale, self.reduced, self.settled = False, True, None
        self.contributions = max(self.contributions, 1)

    def zero_fill(self) -> None:
        """Make a gradient without contributions read as zeros (an unused parameter that takes part in a reduction)."""
        self.settle()
        if self.stale:
            self._buffer().fill(0)
            self.stale = False

    def accumulate(self, contribution: Any) -> None:
        """Add one contribution: an array of this shape, or a function compute(out) that returns it.

        The function is called with out=None to make a new array, or with the gradient's buffer to write into. With a
        `contribution_recorder` set, the recorder gets the whole contribution as an array of its own, and the gradient
        stays as it is.
        """
        recorder = contribution_recorder.get()
        if recorder is not None:
            recorder(self, self._check(contribution(None) if callable(contribution) else xp.array(contribution)))
            return
        self.settle()
        if self.contributions == 0:
            if callable(contribution):
                contribution(self._buffer())
            else:
                xp.copyto(self._buffer(), self._check(contribution))
            self.stale = False
        else:
            value = self._check(contribution(None) if callable(contribution) else contribution)
            if value.itemsize == 2:
                add_into(self._grad, value)
            else:
                self._grad += value
        self.contributions += 1

    def _buffer(self) -> xp.Array:
        if self._grad is None:
            if self.flat is None:
                self._grad = track(xp.empty(self._shape, self._dtype, self._data), "gradient")
            else:
                self.flat.make_grad_of(self)  # binds the buffers of its neighbours too
        return self._grad

    def _check(self, value: xp.Array) -> xp.Array:
        if value.shape != self._shape:
            raise ShapeError(
                f"gradient of parameter {self.name!r} has shape {value.shape}; the parameter has {self._shape}"
            )
        return value

    def register_post_accumulate_grad_hook(self, hook: "Callable[[Parameter], None]") -> Callable[[], None]:
        """Call hook(parameter) in each backward pass after the parameter's last contribution. Returns a remover."""
        self.ready_hooks.append(hook)
        return lambda: self.ready_hooks.remove(hook)

    def __repr__(self) -> str:
        state = "released" if self._data is None else repr(self._data)
        return f"Parameter({self.name!r}, {state})"


class ParameterUse:
    """One use of a parameter by a node: reads the array bound at the time of the backward, if the version is right."""

    __slots__ = ("parameter", "version")

    def __init__(self, parameter: Parameter, version: int) -> None:
        self.parameter = parameter
        self.version = version

    @property
    def data(self) -> xp.Array:
        """The parameter's array; an error when it is not of the version that forward saw."""
        if self.parameter.version != self.version:
            raise VersionError(
                f"parameter {self.parameter.name!r} has version {self.parameter.version}, but forward used version "
                f"{self.version}; run backward before the update, or bind the stashed data with its version"
            )
        return self.parameter.data


assert Node is not Parameter  # `record` tells a parameter's edge from others by the class of its node
