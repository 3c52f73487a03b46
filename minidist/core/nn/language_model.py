"""What GPT and Llama have in common: an output projection behind a decoder, and the loss.

    tokens ──▶ decoder ──▶ lm_head ──▶ logits_fn ──▶ logits          model(tokens)
                                  └──▶ loss_fn   ──▶ loss            model(tokens, targets)

`loss_fn` and `logits_fn` are what changes when the vocabulary is split over ranks: `LossParallel` replaces both.

Proved by: tests/nn/test_modules.py, tests/nn/test_llama.py
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from minidist.core.autograd import Parameter, Tensor, cross_entropy, linear, reshape
from minidist.core.base import arrays as xp
from minidist.core.nn.embedding import Embedding
from minidist.core.nn.experts import auxiliary_losses
from minidist.core.nn.module import Identity, Module


class TiedHead(Module):
    """The output projection that shares the token embedding's weight: (..., D) -> (..., vocab)."""

    def __init__(self, wte: Embedding) -> None:
        # The same Parameter object: its gradient is the sum over both uses.
        self.weight = wte.weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., vocab)."""
        return linear(x, self.weight)


def with_own_weight(head: Any) -> Any:
    """Return a tied head with a copy of its weight, of the same name, for a stage that does not have the embedding."""
    head, shared = copy(head), head.weight
    head.weight = Parameter(xp.array(shared.data), shared.requires_grad, shared.name, shared.init)
    head.weight.layout = shared.layout
    return head


class LanguageModel(Module):
    """Base of GPT and Llama. `model(tokens)` gives logits (batch, T, vocab), `model(tokens, targets)` the loss.

    Subclasses define `decoder`, `blocks` and `stage`, and set `lm_head`, which takes the decoder's output to logits.
    """

    lm_head: Any  # a TiedHead or a Linear, or what a parallel style puts in its place; it has a `weight`

    def __init__(self) -> None:
        self.aux_loss_weight: float | None = None  # of the experts' auxiliary losses; None without experts
        self.loss_fn: Callable[..., Tensor] = cross_entropy  # (logits, targets, divisor) -> shape ()
        self.logits_fn: Module = Identity()

    @property
    def decoder(self) -> Module:
        """The module that turns tokens (batch, T) into features (batch, T, D)."""
        raise NotImplementedError(f"{type(self).__name__} has no decoder")

    @property
    def blocks(self) -> Sequence[Module]:
        """The repeated layers, in order: what a pipeline cuts between and FSDP shards one by one."""
        raise NotImplementedError(f"{type(self).__name__} has no blocks")

    def stage(self, first: int, last: int, is_first: bool, is_last: bool) -> Module:
        """Return blocks first..last-1 as a stage of a pipeline: the first one embeds, the last one has the head."""
        raise NotImplementedError(f"{type(self).__name__} has no stages")

    def forward(
        self, tokens: Any, targets: Any = None, divisor: float | None = None, positions: xp.Array | None = None
    ) -> Tensor:
        """Integers (batch, T) -> logits (batch, T, vocab); with targets (batch, T) the loss, of shape ().

        divisor: as in `cross_entropy`. positions (T,): of the tokens in their text, when they are a part of it
        (context parallelism). With experts their auxiliary losses are added to the loss.
        """
        # (batch, T, vocab), or this rank's words only when the vocabulary is split.
        tokens = xp.as_array(tokens)
        logits = self.lm_head(self.decoder(tokens, positions))
        if targets is None:
            return self.logits_fn(logits)
        loss = self.loss_fn(logits, targets, divisor)
        if self.aux_loss_weight is None:
            return loss
        # This group's share of the step, so that the sum over micro-batches and ranks is the mean of the groups.
        return self.with_auxiliary(loss, auxiliary_losses(self.blocks), tokens.size / (divisor or tokens.size))

    def with_auxiliary(self, loss: Tensor, auxiliary: Tensor, share: float) -> Tensor:
        """Add the experts' losses; share: of this group in the step, so that the groups' losses are averaged."""
        assert self.aux_loss_weight is not None
        return loss + reshape(auxiliary, loss.shape) * (self.aux_loss_weight * share)
