"""One flat array for the parameters of a unit and one for their gradients; the parameters are views of them.

Optimizers, clipping, collectives, shards and checkpoints all work on slices of these two arrays. A unit is the model
(data parallelism), a module (FSDP) or a stage's chunk (pipelines). Gathering, freeing, stashing and offloading
parameters need only `bind` and `release`.

    data    | weight 0 | bias 0 | weight 1 | bias 1 |pad|      parameter.data is a view of its slice,
    grad    | weight 0 | bias 0 | weight 1 | bias 1 |pad|      and so is the buffer of parameter.gradient

Proved by: tests/nn/test_flat.py
"""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise, starmap
from typing import Any

from minidist.core.autograd import AutogradError, Parameter, ShapeError
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.trace import track, watchers


class FlatParameters:
    """Owns the storage of `parameters`, in the given order (registration order); a parameter given twice counts once.

    pad_to: the flat arrays are padded with zeros at the end to a multiple of this many elements.
    numel, padded_numel: elements without and with padding. offsets: start of each parameter, and `numel` at the end.
    parameters, names: as registered. version: number of updates of the bound data.

    A frozen parameter (requires_grad=False) has its place in both arrays, so that one slice serves data and gradient;
    its gradient stays zero. A parameter has one owner: a second one is an error.
    """

    def __init__(self, parameters: Iterable[Parameter], pad_to: int = 1) -> None:
        hooks.check_whole("pad_to", pad_to, 1)
        try:
            self.parameters: list[Parameter] = list(dict.fromkeys(parameters))
            self.names = [parameter.name for parameter in self.parameters]
        except (TypeError, AttributeError):
            hooks.wrong_arguments().check_parameters("FlatParameters", parameters)
            raise

        # One owner and one dtype, because the parameters become views of one array.
        for parameter in self.parameters:
            if parameter.flat is not None or parameter.dtype != self.parameters[0].dtype:
                hooks.refusals().refuse_flat(parameter, self.parameters[0])

        self.offsets = [0, *accumulate(parameter.size for parameter in self.parameters)]
        self._places = dict(zip(self.parameters, starmap(slice, pairwise(self.offsets)), strict=True))
        self.numel = self.offsets[-1]
        self.padded_numel = -(-self.numel // pad_to) * pad_to
        self.version = 0
        self.version_is_given = False  # has the owner said which version it bound?
        self.updates: Any = "0 updates"  # what the last optimizer's step said of itself; replicas compare it
        self.unsynchronized = False  # are there gradients of passes under `no_sync` alone?
        self.shard: Any = None  # holds the reduced gradient, so that `zero_grad` and `Parameter.zero_grad` reach it
        self._filled: set[Parameter] = set()  # whose gradient is zeros because `grad` was read
        self.load_checks: list[Callable[[], None]] = []  # called after a `load_state_dict` of these parameters
        self._data: xp.Array | None = None
        self._grad: xp.Array | None = None

        # Copy the values, and gradients that are there already, into the flat arrays.
        like = self.parameters[0].data if self.parameters else None
        self.dtype = like.dtype if like is not None else xp.dtype(xp.float32)
        data = xp.zeros(self.padded_numel, self.dtype, like)
        for parameter, place in self._places.items():
            data[place] = parameter.data.reshape(-1)
            parameter.flat = self
        self.bind(data)

        # Gradients that exist already move into the flat gradient, which is made only if there are any.
        kept = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for parameter in self.parameters:
            parameter.gradient.release()
        for parameter, gradient in kept:
            parameter.grad = gradient

    def __reduce_ex__(self, protocol: Any) -> Any:
        hooks.refusals().refuse_copy(self.unit)
        return super().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return len(self.parameters)

    @property
    def data(self) -> xp.Array:
        """The bound flat array of `padded_numel` elements; an error while released."""
        if self._data is None:
            raise hooks.operation_checks().released(self) or AutogradError(f"{self.unit} is released")
        return self._data

    @property
    def released(self) -> bool:
        """True while no data is bound."""
        return self._data is None

    def bind(self, array: xp.Array, version: int | None = None) -> None:
        """Make the parameters views of `array`, 1-D, of `numel` or `padded_numel` elements. No copy, no communication.

        version: of the values in `array`, when they are not the latest (a stashed copy, bound with the version it had).
        """
        # A stashed or gathered array may come with the padding or without it.
        if array.shape not in ((self.numel,), (self.padded_numel,)):
            expected = f"({self.padded_numel},) or ({self.numel},)"
            raise ShapeError(f"bind: array of shape {array.shape} for {self.unit}; expected {expected}")

        # Every parameter is a view from now on; the array that was bound before is freed when nothing else holds it.
        self._data = track(array, "parameter")
        for parameter, place in self._places.items():
            parameter.bind(array[place].reshape(parameter.shape))
        self.version_is_given = version is not None
        if version is not None:
            self.version = version

    def release(self) -> xp.Array:
        """Unbind the data and return it (dropped, it is freed). Reading a parameter is an error until `bind`."""
        data = self.data
        self._data = None
        # A parameter that still had its view would keep the whole array alive.
        for parameter in self.parameters:
            parameter.release()
        return data

    def updated(self, by: Any = None) -> None:
        """Note that the values changed: one more version. by: what an optimizer's step says of itself."""
        self.version += 1
        self.updates = by or self.updates

    @property
    def grad(self) -> xp.Array:
        """The flat gradient of `padded_numel` elements; parameters without a contribution, and the padding, are zeros.

        Raises AutogradError while a gradient is partly summed over ranks (a pass under `no_sync` came last).
        """
        grad = self.grad_buffer
        for parameter in self.parameters:
            local, total = parameter.gradient.local, parameter.gradient.total
            if local is not None and total is not None:
                hooks.refusals().refuse_partial(parameter)
            if local is None and total is None:
                parameter.zero_fill()
                self._filled.add(parameter)
        return grad

    def have_grad(self, parameters: Iterable[Parameter]) -> list[bool]:
        """Return which of these parameters have a gradient; zeros that reading `grad` has filled in are none."""
        # Each step asks for every parameter: `grad` itself would take twice as long.
        filled = self._filled
        if not filled:
            both = ((p, p.gradient) for p in parameters)
            return [(g.local is not None or g.total is not None) and p.requires_grad for p, g in both]
        return [
            (grad := p.grad) is not None and (p not in filled or xp.is_meta(grad) or not (grad == 0).all())
            for p in parameters
        ]

    @property
    def grad_buffer(self) -> xp.Array:
        """The flat gradient as it is: before its first contribution a parameter's slice holds old values."""
        return FlatParameters.make_grad_of(self) if self._grad is None else self._grad

    def make_grad_of(self, parameter: Parameter | None = None) -> xp.Array:
        """Make the gradient buffer before the first contribution to `parameter`: all get theirs, slices of one array.

        ZeRO 2, which makes one buffer per bucket, puts another function in the place of this one.
        """
        self._grad = xp.empty(self.padded_numel, self.dtype, self._data)
        for watcher in watchers.get():
            watcher.allocated(self._grad, "gradient")
        # Only the padding is cleared: a first contribution overwrites, `grad` fills in what has none.
        self._grad[self.numel :] = 0
        for parameter, place in self._places.items():
            parameter.gradient.buffer = self._grad[place].reshape(parameter.shape)
        return self._grad

    def zero_grad(self) -> None:
        """Forget all gradients. No memory is cleared: the next contribution overwrites, `grad` fills in zeros."""
        self.unsynchronized = False
        self._filled.clear()
        for parameter in self.parameters:
            parameter.gradient.clear()
        if self.shard is not None:
            self.shard.zero_grad()

    def release_grad(self) -> None:
        """Drop the gradient buffer (after its shards are reduced); the next contribution makes a new one."""
        self._grad = None
        self._filled.clear()
        for parameter in self.parameters:
            parameter.gradient.release()

    def slice_of(self, parameter: Parameter) -> slice:
        """Return where `parameter` lies in the flat arrays."""
        return self._places[parameter]

    @property
    def unit(self) -> str:
        """The unit in words, by its first and last parameter."""
        return f"the unit [{self.names[0]!r} .. {self.names[-1]!r}]" if self.names else "an empty unit"
