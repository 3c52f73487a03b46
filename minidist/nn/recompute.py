"""Which parts of a model are computed twice so that their activations need not be kept: time for memory.

    none        every block keeps all that its backward reads
    selective   only the attention core (scores and softmax) runs again: little work, much memory on long sequences
    full        a block keeps its input only, and its whole forward runs again in backward: a third more work
    sqrt        of about sqrt(L) segments of blocks only the inputs are kept: 2 sqrt(L) blocks, for the same work
    budget:N    segments, and as many blocks kept whole as fit into N bytes of activations (see segments.py)

Each choice replaces a part of the model: the blocks by `CheckpointWrapper`s, their list by `SegmentedBlocks`, or each
attention's `attention_fn` by one that recomputes.

Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016; Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022, section 5. The replay draws the same dropout masks (see
`autograd.checkpoint`), so all of them train to the same bits.

Proved by: tests/nn/test_recompute.py, tests/nn/test_segments.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import whole_number
from minidist.core.base import arrays as xp
from minidist.core.nn.gpt import GPT
from minidist.core.nn.layers import MLP
from minidist.core.nn.module import Module
from minidist.nn import checkpoint
from minidist.nn.cnn import CNN
from minidist.nn.llama import Llama
from minidist.nn.segments import CheckpointWrapper, SegmentedBlocks, budgeted_segments, measured, sqrt_segments

CHOICES = ("none", "full", "selective", "sqrt", "budget:BYTES")


def recompute(
    model: Module,
    what: str,
    pack: Callable[[Any], Any] | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> Module:
    """Make the blocks of a GPT, Llama or CNN (the layers of an MLP) recompute; changes `model` in place and returns it.

    pack: with "full", "sqrt" or "budget:N", what a segment's input becomes until backward reads it (see `checkpoint`).
    shape, dtype: of a block's input, for "budget:N", which runs the first block twice to see how much it keeps.
    Call it before a strategy wraps the model. Errors: UsageError for another word, for a model without blocks, for
    "selective" where there is no attention, for a budget that nothing fits, and for a budget of an MLP.
    """
    budget = budget_of(what)
    if what == "none":
        return model

    # The list of blocks, wherever the model has it.
    owner, name = _place_of_blocks(model)
    blocks = getattr(owner, name)

    # Selective: only the attention core is wrapped, in every attention of the model.
    if what == "selective":
        attentions: list[Any] = [module for module in model.modules() if hasattr(module, "attention_fn")]
        if not attentions:
            raise UsageError(
                f"recompute 'selective' is for attention, which {type(model).__name__} does not have; use 'full'"
            )
        for attention in attentions:
            attention.attention_fn = partial(checkpoint, attention.attention_fn)
        return model

    # The others replace the list of blocks.
    if what == "full":
        replaced: list[Any] = [CheckpointWrapper(block, pack) for block in blocks]
    elif what == "sqrt":
        replaced = SegmentedBlocks(blocks, sqrt_segments(len(blocks)), pack)
    else:
        assert budget is not None
        replaced = SegmentedBlocks(blocks, _sizes_within(budget, model, blocks, shape, dtype), pack)
    setattr(owner, name, replaced)
    return model


def _sizes_within(
    budget: int, model: Module, blocks: list[Any], shape: tuple[int, ...] | None, dtype: Any
) -> list[int]:
    """Return sizes of recomputed segments with which `blocks` keep at most `budget` bytes of activations."""
    what = f"budget:{budget}"
    if shape is None:
        raise UsageError(
            f"recompute {quoted(what)} needs the shape of a block's input to know what it keeps; pass shape=(rows, ...,"
            " width)"
        )
    if isinstance(model, MLP):
        raise UsageError(
            f"recompute {quoted(what)} measures one block, and the layers of an MLP differ in size; use 'sqrt' or"
            " 'full'"
        )

    # One block stands for all, since they are equal in size.
    angles = (model.model.rotary_emb(xp.device_arange(shape[1])),) if isinstance(model, Llama) else ()
    nbytes, inside = measured(blocks[0], shape, dtype, *angles)
    sizes, _ = budgeted_segments([nbytes] * len(blocks), [inside] * len(blocks), budget)
    return sizes


def budget_of(what: str) -> int | None:
    """Return N of "budget:N", None for the other choices; UsageError for anything else."""
    if what in CHOICES[:-1]:
        return None
    word, _, number = what.partition(":")
    nbytes = whole_number(number)
    if word != "budget" or nbytes is None:
        raise UsageError(f"recompute {quoted(what)}; it must be one of {', '.join(CHOICES)}")
    return nbytes


def _place_of_blocks(model: Module) -> tuple[Module, str]:
    """Return the module that runs the blocks, and the name of its attribute that holds them."""
    # The models of this package keep their blocks in a list, which `run_blocks` runs.
    if isinstance(model, GPT):
        return model.transformer, "h"
    if isinstance(model, Llama):
        return model.model, "layers"
    if isinstance(model, (MLP, CNN)):
        return model, "layers"
    raise UsageError(
        f"recompute knows the blocks of GPT, Llama, CNN and MLP, not of {type(model).__name__}; wrap yours in"
        " checkpoint(...)"
    )
