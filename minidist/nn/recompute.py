"""Which parts of a model are computed twice so that their activations need not be kept: time for memory.

    none        every block keeps all that its backward reads
    selective   only the attention core (scores and softmax) is computed again: little work, much memory on long sequences
    full        a block keeps its input and nothing else, and its whole forward runs again in backward: a third more work

Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016; Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022, section 5. The replay draws the same dropout masks (see
`autograd.checkpoint`), so all three train to the same bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from minidist.autograd import Tensor, checkpoint
from minidist.base.errors import UsageError
from minidist.nn.module import Module

CHOICES = ("none", "full", "selective")


def recompute(model: Module, what: str, pack: Callable[[Any], Any] | None = None) -> Module:
    """Let the blocks of a GPT or Llama (the layers of an MLP) recompute; changes `model` in place and returns it.

    pack: with "full", what a block's input becomes until backward reads it (see `checkpoint`).
    Call it before a strategy wraps the model. Errors: UsageError for another word, for a model without blocks, and for
    "selective" where there is no attention.
    """
    if what not in CHOICES:
        raise UsageError(f"recompute {what!r}; it must be one of {', '.join(CHOICES)}")
    if what == "none":
        return model
    blocks = _blocks(model)
    for block in blocks:
        if what == "full":
            vars(block)["forward"] = partial(checkpoint, block.forward, pack=pack)
        else:
            attentions: list[Any] = [module for module in block.modules() if hasattr(module, "attention_fn")]
            if not attentions:
                raise UsageError(f"recompute 'selective' is for attention, which {type(model).__name__} does not have; use 'full'")
            for attention in attentions:
                attention.attention_fn = _replayed(attention.attention_fn)
    return model


def _blocks(model: Module) -> list[Module]:
    for owner, name in ((getattr(model, "transformer", None), "h"), (getattr(model, "model", None), "layers"), (model, "layers")):
        if owner is not None and hasattr(owner, name):
            return list(getattr(owner, name))
    raise UsageError(f"recompute knows the blocks of GPT, Llama and MLP, not of {type(model).__name__}; wrap yours in checkpoint(...)")


def _replayed(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: checkpoint(attention, *arguments)
