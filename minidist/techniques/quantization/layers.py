"""Training for INT8: layers that round their operands to 8 bits while they train, and integer products afterwards.

    training     x ─ observe ─▶ fake_quantize(uint8) ─┐
                                                      ├─▶ linear in floats           `QATLinear`
                 weight ──────▶ fake_quantize(int8) ──┘
    evaluation   uint8 x ─▶ integer product, int32 sums ─▶ times both scales, + bias  `Int8Linear`

The weight is known, so its scale is that of its largest magnitude now: one for each output channel, or one for all. The
range of the inputs is not known before they are there, so an observer remembers it. A step quantises with the range of
the steps before it and observes its own rows; when it ends, `ranges.update_ranges` merges what all ranks
saw. So the result does not depend on which rank had which rows, and the inputs of the first step are not quantised.
(Transformer Engine calls this delayed scaling; torch.ao updates within every forward pass, on each rank alone.)

Sources: Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only inference",
CVPR 2018, sections 2 and 3; torch.ao.quantization's observers and qat.Linear.
Proved by: tests/techniques/test_quantized_layers.py
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from minidist.base import arrays as xp
from minidist.core.autograd import Tensor, gelu, is_grad_enabled, linear
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import new_purpose, track
from minidist.core.nn.layers import Conv1D, Linear
from minidist.core.nn.module import Module
from minidist.nn import relu
from minidist.techniques.quantization.fake_quantize import Grid, affine_grid, fake_quantize, symmetric_grid

new_purpose("quantization_range")

MOST_INPUTS = (2**31 - 1) // (255 * 127)  # of an int32 sum of uint8 x int8 products
AVERAGING_CONSTANT = 0.01  # torch.ao's default
ENDS = ("low", "high")  # of a range, by name in a checkpoint


class MinMaxObserver:
    """The smallest and largest value seen in all steps. seen: those of this step so far; range: after the last one."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = xp.dtype(dtype)
        self.seen: tuple[Any, Any] | None = None
        self.range: tuple[Any, Any] | None = None

    def observe(self, x: xp.Array) -> None:
        """Take note of the values of one micro-batch; twice the same (recomputation) is as good as once."""
        if x.size:
            low, high = self.seen or (xp.inf, -xp.inf)
            self.seen = min(low, x.min()), max(high, x.max())

    def update(self, low: Any, high: Any) -> None:
        """Merge the smallest and largest value of a step into the range."""
        low, high = self.dtype.type(low), self.dtype.type(high)
        self.range = (low, high) if self.range is None else self.merged(*self.range, low, high)

    def merged(self, old_low: Any, old_high: Any, low: Any, high: Any) -> tuple[Any, Any]:
        """Return the new range from the old one and that of a step."""
        return min(old_low, low), max(old_high, high)


class MovingAverageObserver(MinMaxObserver):
    """Moving averages of the steps' smallest and largest values: range += constant (step's - range)."""

    def merged(self, old_low: Any, old_high: Any, low: Any, high: Any) -> tuple[Any, Any]:
        """Return the range moved towards that of the step."""
        constant = self.dtype.type(AVERAGING_CONSTANT)
        return old_low + constant * (low - old_low), old_high + constant * (high - old_high)


OBSERVERS: dict[str, type[MinMaxObserver]] = {"moving-average": MovingAverageObserver, "min-max": MinMaxObserver}


class QATLinear(Module):
    """A `Linear` or `Conv1D` with the same parameters that computes with operands rounded to 8 bits.

    In training it observes its inputs. Before the first range is known they are used as they are.
    """

    def __init__(self, layer: Linear | Conv1D, observer: MinMaxObserver, per_channel: bool = True) -> None:
        self.name, self.weight, self.bias = layer.name, layer.weight, layer.bias
        self.activation = getattr(layer, "activation", None)
        self.weight_is_in_out = getattr(layer, "weight_is_in_out", isinstance(layer, Conv1D))
        self.observer, self.per_channel = observer, per_channel

    def largest(self) -> xp.Array:
        """Return the largest magnitude of the weight as it is now, over the dim that the product sums over, or all."""
        axis = (0 if self.weight_is_in_out else 1) if self.per_channel else None
        result: xp.Array = xp.absolute(self.weight.data).max(axis=axis, keepdims=True)
        return result

    def weight_grid(self) -> Grid:
        """Return the grid of the weight: one scale per output channel, or one."""
        return symmetric_grid(self.largest(), self.weight.dtype)

    def input_grid(self) -> Grid | None:
        """Return the grid of the inputs; None before a range is known."""
        return None if self.observer.range is None else affine_grid(*self.observer.range, self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        # A forward without a graph (evaluation, the first run of a recomputed block) is not observed.
        if self.training and is_grad_enabled():
            self.observer.observe(x.data)
        grid = self.input_grid()
        if grid is not None:
            rounded = fake_quantize(x, grid)
            # What keeps something smaller than its values for backward (gathered rows) is rounded again there.
            x = rounded if type(x) is Tensor else RoundedAgain(rounded, x, grid)
        return self.product(x, fake_quantize(self.weight, self.weight_grid()))

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the layer's result for operands that are rounded."""
        return linear(x, weight, self.bias, self.activation, self.weight_is_in_out)

    def to_int8(self) -> "Int8Linear":
        """Return the layer that computes with integers."""
        return Int8Linear(self)


class RoundedAgain(Tensor):
    """`rounded`, for which a node saves what it would save for `source`, and rounds it again in backward."""

    __slots__ = ("_kept",)

    def __init__(self, rounded: Tensor, source: Tensor, grid: Grid) -> None:
        super().__init__(rounded.data)
        self.node, self._kept = rounded.node, RoundAgain(source.saved(), grid)

    def saved(self) -> "RoundAgain":
        return self._kept


class RoundAgain(NamedTuple):
    """What a node has saved for a source; its values are rounded to the grid when backward reads them."""

    source: Any
    grid: Grid

    @property
    def data(self) -> xp.Array:
        """The rounded values."""
        return self.grid.dequantize(self.grid.quantize(self.source.data))


class Int8Linear(Module):
    """A trained `QATLinear` with its weight as int8, (in, out); inputs become uint8 and products are summed in int32.

    sums: of each column of the weight, which the zero point of the inputs multiplies. Raises UsageError for a layer
    that has no range, or more inputs than an int32 holds the sum of.
    """

    def __init__(self, layer: QATLinear) -> None:
        grid, weight = layer.input_grid(), layer.weight_grid()
        if grid is None:
            raise UsageError(
                f"layer {layer.name!r} has no range of inputs, so it cannot be converted to INT8; train at least one"
                " step, and call update_ranges at its end"
            )
        transposed = (lambda array: array) if layer.weight_is_in_out else xp.transpose
        self.name, self.bias, self.activation, self.grid = layer.name, layer.bias, layer.activation, grid
        self.weight = track(transposed(weight.quantize(layer.weight.data)), "parameter")
        self.scale = (transposed(weight.scale) * grid.scale).reshape(-1)
        self.sums = self.weight.sum(axis=0, dtype="int32")
        if self.weight.shape[0] > MOST_INPUTS:
            raise UsageError(
                f"layer {layer.name!r} sums {self.weight.shape[0]:,} products of 8-bit numbers, and int32 holds the sum"
                f" of {MOST_INPUTS:,}; leave this layer in floats"
            )

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), without a gradient."""
        result = self.product(x)
        result = result if self.bias is None else result + self.bias.data
        activation: Callable[[Tensor], Tensor] = {None: lambda y: y, "relu": relu, "gelu": gelu}[self.activation]
        return activation(result)

    def product(self, x: Tensor) -> Tensor:
        """Return x times the weight, from the integer sums."""
        total = int8_matmul(self.grid.quantize(x.data), self.weight)
        total -= self.grid.zero_point.astype("int32") * self.sums
        return Tensor(total.astype(self.scale.dtype) * self.scale)


def int8_matmul(x: xp.Array, weight: xp.Array) -> xp.Array:
    """Return x (..., in), uint8, times weight (in, out), int8, as int32: the exact sums."""
    result: xp.Array = xp.matmul(x.astype("int32"), weight.astype("int32"))
    return result


# --- the layers of a model --------------------------------------------------------------------------------------------


def prepare_qat(model: Module, observer: str = "moving-average", per_channel: bool = True) -> Any:
    """Put a `QATLinear` in the place of every `Linear` and `Conv1D`; returns the model. UsageError when there is none.

    observer: "moving-average" or "min-max". Call it before a strategy wraps the model.
    """
    kind = OBSERVERS[observer]
    if isinstance(model, (Linear, Conv1D)):
        return QATLinear(model, kind(model.weight.dtype), per_channel)
    replaced = replace_layers(
        model,
        lambda layer: isinstance(layer, (Linear, Conv1D)),
        lambda layer: QATLinear(layer, kind(layer.weight.dtype), per_channel),
    )
    if not replaced:
        raise UsageError(
            f"{type(model).__name__} has no Linear or Conv1D layer to quantise; use these for its products, or leave"
            " quantisation out"
        )
    return model


def observers_of(model: Module) -> dict[str, MinMaxObserver]:
    """Return the observers of a model's `QATLinear` layers by qualified name, in the order of the model."""
    return {name: layer.observer for name, layer in model.named_modules() if isinstance(layer, QATLinear)}


def ranges_state(observers: Mapping[str, MinMaxObserver]) -> dict[str, float]:
    """Return the known ranges as numbers for a checkpoint: {"range.LAYER.low": ..., "range.LAYER.high": ...}."""
    known = {name: observer.range for name, observer in observers.items() if observer.range is not None}
    return {f"range.{name}.{end}": float(v) for name, both in known.items() for end, v in zip(ENDS, both, strict=True)}


def load_ranges(observers: Mapping[str, MinMaxObserver], state: Mapping[str, float]) -> None:
    """Restore what `ranges_state` returned; UsageError for a range whose ends are missing or the wrong way round."""
    for name, observer in observers.items():
        low, high = (state.get(f"range.{name}.{end}") for end in ENDS)
        if (low is None) != (high is None) or (low is not None and high is not None and low > high):
            raise UsageError(
                f"the range of layer {name!r} in the checkpoint is from {low} to {high}; use another checkpoint"
            )
        observer.seen = observer.range = None
        if low is not None:
            observer.update(low, high)


def int8_bytes(model: Module) -> dict[str, int]:
    """Return what the weights of the `QATLinear` layers take: {"weight_bytes": as int8 with scales, "float_bytes":}."""
    layers = {id(layer): layer for layer in model.modules() if isinstance(layer, QATLinear)}.values()
    # From shapes, as a rank of a pipeline has no weights of other stages; of a shard that of the whole weight.
    shapes = [layer.weight.layout.global_shape if layer.weight.layout else layer.weight.shape for layer in layers]
    sizes = [math.prod(shape) for shape in shapes]
    outputs = [
        shape[1 if layer.weight_is_in_out else 0] if layer.per_channel else 1
        for layer, shape in zip(layers, shapes, strict=True)
    ]
    itemsize = max((layer.observer.dtype.itemsize for layer in layers), default=0)
    return {"weight_bytes": sum(sizes) + sum(outputs) * itemsize, "float_bytes": sum(sizes) * itemsize}


def convert(model: Module) -> Any:
    """Put an `Int8Linear` in the place of every `QATLinear`; returns the model, which trains no more."""
    if isinstance(model, QATLinear):
        return model.to_int8()
    replace_layers(model, _is_prepared, lambda layer: layer.to_int8())
    return model


@contextmanager
def converted(model: Module) -> Iterator[None]:
    """Compute with `convert`ed layers inside the block."""
    replaced = replace_layers(model, _is_prepared, lambda layer: layer.to_int8())
    try:
        yield
    finally:
        for container, key, layer in replaced:
            container[key] = layer


def _is_prepared(layer: Module) -> bool:
    return isinstance(layer, QATLinear)


def replace_layers(
    model: Module, chosen: Callable[[Any], bool], make: Callable[[Any], Module]
) -> list[tuple[Any, Any, Module]]:
    """Put make(layer) in the place of every chosen layer below `model`; returns (container, key, layer) of each."""
    slots = [slot for module in model.modules() for slot in _slots(vars(module)) if chosen(slot[2])]
    found = {id(layer) for _, _, layer in slots}
    for name, layer in model.named_modules():
        if chosen(layer) and id(layer) not in found:
            raise UsageError(f"layer {name!r} is in a tuple, where no other can take its place; use a list")

    # A layer that is used in two places becomes one layer again. All are made before any is put in.
    made = {id(layer): make(layer) for _, _, layer in slots}
    for container, key, layer in slots:
        container[key] = made[id(layer)]
    return slots


def _slots(container: Any) -> Iterator[tuple[Any, Any, Module]]:
    """Yield (container, key, module) of the modules in a dict or list, and in those inside it."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if isinstance(value, Module):
            yield container, key, value
        elif isinstance(value, (dict, list)) and key not in ("_forward_pre_hooks", "_forward_hooks"):
            yield from _slots(value)
