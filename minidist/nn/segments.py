"""A chain of layers in recomputed segments: how long they are, and how they run.

    x ──[ F F F ]──[ F F F ]──[ F F F ]──▶       keep the input of each segment; in backward run a segment again, and
        kept        kept        kept             then its backward

- `sqrt_segments(L)`: about sqrt(L) segments of sqrt(L) layers, 2 sqrt(L) layers of memory for one more forward
  (Chen et al., "Training deep nets with sublinear memory cost", 2016).
- `budgeted_segments(inputs, insides, budget)`: as few layers as possible run twice, and the bytes alive never exceed
  the budget: layers at the end are kept whole (they are freed first), the others divided so that what is kept and the
  segment that runs again fit together.

Segments inside segments are in `revolve`.

Proved by: tests/nn/test_segments.py, tests/nn/test_recompute.py
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from math import isqrt
from typing import Any

from minidist.base.coordinates import batch_coordinates
from minidist.base.memory import account_memory
from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.nn.module import Module
from minidist.nn import checkpoint

Layer = Callable[[Tensor], Tensor]
Pack = Callable[[Any], Any]


def sqrt_segments(layers: int) -> list[int]:
    """Return sizes of about sqrt(layers) segments that differ by at most one; [4, 4, 4, 4] for 16."""
    if layers < 1:
        raise UsageError(f"{layers} layers; at least 1 is needed to make segments")
    # sqrt(layers), rounded to the nearest; the first segments are longer by one when they do not divide evenly.
    count = isqrt(layers)
    count += count * (count + 1) < layers
    return [layers // count + (number < layers % count) for number in range(count)]


def budgeted_segments(inputs: Sequence[int], insides: Sequence[int], budget: int) -> tuple[list[int], int]:
    """Return (sizes of the segments that run twice, number of layers at the end that are kept whole).

    inputs[i], insides[i]: bytes of layer i's input, and of what recording layer i adds to what is alive. The
    activations that are kept are at most `budget` at any moment: in forward the segments' inputs and the last layers
    whole (which have an input, too); in backward the inputs of the segments up to one, and that one whole. As few
    layers as possible run twice. Raises UsageError with the smallest budget that is enough.
    """
    if len(inputs) != len(insides) or not inputs:
        raise UsageError(
            f"{len(inputs)} inputs for {len(insides)} layers; give one for each layer, and at least one layer"
        )
    plan = _budgeted(inputs, insides, budget)

    # Too small: find the smallest budget that is enough, by halving the interval, for the error message.
    if plan is None:
        low, high = budget, sum(inputs) + sum(insides)
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _budgeted(inputs, insides, middle) else (middle, high)
        raise UsageError(
            f"activations of {len(inputs)} layers do not fit into {budget} B; segments need at least {high} B"
        )
    return plan


def _budgeted(inputs: Sequence[int], insides: Sequence[int], budget: int) -> tuple[list[int], int] | None:
    """As `budgeted_segments`, but None where the budget is too small. Dynamic programming over the segments' ends.

    kept[i] is the fewest bytes of segment inputs with which the layers before i can run within the budget. Fewer are
    always better for what follows, so only the best start of the segment that ends before i has to be known.
    """
    count = len(inputs)
    kept: list[int | None] = [0] + [None] * count
    start_of = [0] * (count + 1)  # of the last segment before i

    # Segments that end before layer `stop`, from the shortest: the segment that runs again is whole in memory, with the
    # inputs that are kept.
    for stop in range(1, count + 1):
        inside = 0
        for start in range(stop - 1, -1, -1):
            inside += insides[start]
            # No way to run the layers before `start`, or the segment does not fit in addition to what they keep.
            before = kept[start]
            if before is None or before + inputs[start] + inside > budget:
                continue
            best = kept[stop]
            if best is None or before + inputs[start] < best:
                kept[stop], start_of[stop] = before + inputs[start], start

    # Layers first, first + 1, ... are kept whole: the least `first` that fits runs the fewest layers twice.
    for first in range(count + 1):
        before = kept[first]
        if before is not None and before + (inputs[first] if first < count else 0) + sum(insides[first:]) <= budget:
            # Follow the starts back from `first` to 0.
            sizes, stop = [], first
            while stop:
                sizes.append(stop - start_of[stop])
                stop = start_of[stop]
            return sizes[::-1], count - first
    return None


def checkpointed(
    function: Callable[..., Tensor], modules: Sequence[Any], *arguments: Any, pack: Pack | None = None
) -> Tensor:
    """checkpoint(function, *arguments), also where `function` runs `modules` with experts.

    Their balancing losses are outputs of the segment: computed inside and read from outside they would have no
    gradient.
    """
    # Without experts there is one output, and nothing to carry out of the segment.
    experts = [module.mlp for module in modules if hasattr(getattr(module, "mlp", None), "auxiliary_loss")]
    if not experts:
        return checkpoint(function, *arguments, pack=pack)

    def with_losses(*values: Any) -> tuple[Tensor, ...]:
        # The losses leave the segment as outputs, so that the tape outside has a node for them.
        result = function(*values)
        return (result, *(mixture.auxiliary_loss for mixture in experts))

    result, *losses = checkpoint(with_losses, *arguments, pack=pack)
    for mixture, loss in zip(experts, losses, strict=True):
        mixture.auxiliary_loss = loss
    return result


class CheckpointWrapper(Module):
    """A block that keeps its input only: its whole forward runs again in backward.

    It takes the block's place in the model, and its parameters and submodules are found, under the same names and as
    attributes, as if it were the block. Hooks on the wrapper run around the recomputation, not inside it.
    """

    def __init__(self, block: Module, pack: Pack | None = None) -> None:
        self.block, self.pack = block, pack
        self.name = block.name

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key == "block":  # asked for while the wrapper itself is being copied
            raise AttributeError(key)
        return getattr(self.block, key)

    def _members(self) -> Iterator[tuple[str, Any]]:
        return self.block._members()

    def forward(self, *arguments: Any) -> Tensor:
        """The block's output for x (batch, ...) and what else it takes."""
        return checkpointed(self.block, [self.block], *arguments, pack=self.pack)


class SegmentedBlocks(list[Any]):
    """The blocks of a model; the first sum(sizes) of them run in recomputed segments of these sizes."""

    def __init__(self, blocks: Sequence[Any], sizes: Sequence[int], pack: Pack | None = None) -> None:
        super().__init__(blocks)
        self.sizes, self.pack = list(sizes), pack

    def run(self, x: Tensor, *others: Any) -> Tensor:
        """Run the blocks in their segments; `run_blocks` calls it."""
        return run_segments([_with_others(block, others) for block in self], x, self.sizes, self.pack, self)


def _with_others(block: Callable[..., Tensor], others: tuple[Any, ...]) -> Layer:
    return lambda x: block(x, *others)


def recomputed_modules(model: Module) -> list[Module]:
    """Return the blocks of `model` whose forward runs again in backward."""
    found = [module.block for module in model.modules() if isinstance(module, CheckpointWrapper)]
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, SegmentedBlocks):
                found += value[: sum(value.sizes)]
    return found


def run_segments(
    functions: Sequence[Layer],
    x: Tensor,
    sizes: Sequence[int],
    pack: Pack | None = None,
    modules: Sequence[Any] | None = None,
) -> Tensor:
    """functions[-1](...functions[0](x)): segments of these sizes recomputed, what is left after them kept.

    pack: what a segment's input becomes until backward reads it (see `checkpoint`). modules: the blocks that the
    functions run, when they may hold experts (see `checkpointed`).
    """
    if sum(sizes) > len(functions) or any(size < 1 for size in sizes):
        raise UsageError(
            f"segments of {list(sizes)} layers for a chain of {len(functions)}; each has at least 1, together at"
            " most all"
        )

    # Each segment is one checkpoint; what is left after the last one is recorded as usual.
    first = 0
    for size in sizes:
        segment = slice(first, first + size)
        x = checkpointed(_chain(functions[segment]), (modules or functions)[segment], x, pack=pack)
        first += size
    return _chain(functions[first:])(x)


def measured(block: Callable[..., Tensor], shape: tuple[int, ...], dtype: Any, *others: Any) -> tuple[int, int]:
    """Return (bytes of an input of `shape`, bytes that recording `block` adds to what is alive).

    The block runs twice in a row, and the second run counts: its input is an output, as in the model.
    """
    with account_memory() as account, batch_coordinates(0, 0):
        # The first run makes the input; what the second one adds is a block's share.
        x = Tensor(xp.zeros(shape, dtype), requires_grad=True)
        nbytes, x = x.data.nbytes, block(x, *others)
        once = account.by_purpose["activation"]
        x = block(x, *others)
        return nbytes, account.by_purpose["activation"] - once


def _chain(functions: Sequence[Layer]) -> Layer:
    return lambda x: reduce(lambda value, function: function(value), functions, x)
