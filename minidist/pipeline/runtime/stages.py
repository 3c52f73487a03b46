"""A stage is a slice of the model: a function from the tensors that arrive to the tensors that leave.

    GPT    | wte wpe | h.0 | h.1 | h.2 | h.3 | ln_f head |        the embedding goes with the first stage, the head with the last
    stages |        0      |     1     |          2      |        wte is on both ends: one parameter, two copies

Parameters keep their names in the whole model, so a stage's initial weights are those of one device.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minidist.autograd import Parameter, Tensor
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.layout import chunk_sizes, offsets
from minidist.nn import GPT, MLP, Llama, Module
from minidist.nn.flat import FlatParameters
from minidist.nn.gpt import auxiliary_losses


@dataclass(frozen=True)
class SkipTo:
    """An output that goes past the neighbour, straight to `stage`, which gets it behind what its own neighbour sends.

    It travels once each way, B bytes and B bytes of gradient, whatever number of stages lies between; they hold nothing
    of it.
    """

    stage: int
    tensor: Tensor


class PipelineStage:
    """Stage `number` of a model: `module(*tensors)` returns a tensor or a tuple of tensors, which the next stage
    receives.

    A tensor that a later stage needs is returned as `SkipTo(stage, tensor)`; that stage's module gets it after the
    tensors of the stage before it, several in the order of the stages that they come from. A stage may have no
    parameters. The last stage's output goes to the loss. `flat`: the stage's `parameters`, a unit of their own.
    """

    def __init__(self, module: Any, number: int, flats: Sequence[FlatParameters] | None = None) -> None:
        """flats: the stage's parameters, when somebody has made them flat already."""
        self.module, self.number = module, number
        parameters = list(module.parameters()) if hasattr(module, "parameters") else []
        self.flats = [FlatParameters(parameters)] if flats is None else list(flats)

    @property
    def flat(self) -> FlatParameters:
        """Its one unit."""
        (flat,) = self.flats
        return flat

    @property
    def parameters(self) -> list[Parameter]:
        """Of all units."""
        return [parameter for flat in self.flats for parameter in flat.parameters]


class GPTStage(Module):
    """Some of a GPT's blocks, with the embedding in front or the head behind."""

    def __init__(self, model: GPT, first: int, last: int, embeds: bool, heads: bool) -> None:
        transformer = model.transformer
        self.embeds, self.heads = embeds, heads
        if embeds:
            self.wte, self.wpe, self.drop = transformer.wte, transformer.wpe, transformer.drop
            self._embed = transformer.embed
        self.h = transformer.h[first:last]
        self.experts = bool(model.config.n_experts)
        if heads:
            self.ln_f = transformer.ln_f
            self.head = model.lm_head if embeds else with_own_weight(model.lm_head)  # last: its weight may be a copy

    def forward(self, x: Any, auxiliary: Tensor | None = None) -> Any:
        """Tokens (first stage) or activations (batch, T, D), to activations or logits (last stage); with experts also
        the sum of their auxiliary losses so far, shape (1,).
        """
        if self.embeds:
            x = self._embed(x)
        for block in self.h:
            x = block(x)
        out = self.head(self.ln_f(x)) if self.heads else x
        return (out, auxiliary_losses(self.h, auxiliary)) if self.experts else out


class LlamaStage(Module):
    """Some of a Llama's blocks, with the embedding in front or the head behind."""

    def __init__(self, model: Llama, first: int, last: int, embeds: bool, heads: bool) -> None:
        inner = model.model
        self.embeds, self.heads, self.rotary_emb = embeds, heads, inner.rotary_emb
        if embeds:
            self.embed_tokens = inner.embed_tokens
        self.layers = inner.layers[first:last]
        if heads:
            self.norm = inner.norm
            tied = model.config.tie_word_embeddings and not embeds
            self.head = with_own_weight(model.lm_head) if tied else model.lm_head

    def forward(self, x: Any) -> Tensor:
        """Tokens (first stage) or activations (batch, T, width), to activations or logits (last stage)."""
        angles = self.rotary_emb(xp.arange(x.shape[1]))
        if self.embeds:
            x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x)) if self.heads else x


def with_own_weight(head: Any) -> Any:
    """A tied head with a copy of its weight, for a stage that does not have the embedding."""
    head, shared = copy(head), head.weight
    head.weight = Parameter(xp.array(shared.data), shared.requires_grad, shared.name, shared.init)
    head.weight.layout = shared.layout
    return head


class LayersStage(Module):
    """Some of an MLP's layers."""

    def __init__(self, layers: Sequence[Module]) -> None:
        self.layers = list(layers)

    def forward(self, x: Any) -> Any:
        """The last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x


def split_model(
    model: Module, stages: int, numbers: Sequence[int], cuts: Sequence[int] | None = None
) -> tuple[list[PipelineStage], list[str]]:
    """Stages `numbers` of a GPT, a Llama or an MLP cut into `stages`, and the names of parameters that several stages
    share.

    cuts: how many blocks (layers) each stage gets; by default as equal as possible, the first ones one more. Raises
    UsageError when there are more stages than blocks, or the cuts do not add up.
    """
    modules, tied = cut_model(model, stages, cuts)
    return [PipelineStage(modules[number], number) for number in numbers], tied


def cut_model(model: Module, stages: int, cuts: Sequence[int] | None = None) -> tuple[list[Module], list[str]]:
    """The modules of all stages, and the names of the parameters that several of them share; see `split_model`."""
    blocks: list[Module] = []
    if isinstance(model, (GPT, Llama, MLP)):
        blocks = list(
            model.transformer.h
            if isinstance(model, GPT)
            else model.model.layers
            if isinstance(model, Llama)
            else model.layers
        )
    if not blocks:
        raise UsageError(f"cannot cut a {type(model).__name__}; make PipelineStages of its parts yourself")
    if cuts is None and stages > len(blocks):
        raise UsageError(
            f"cannot cut {len(blocks)} layers into {stages} stages: a stage needs at least one; use --layers {stages},"
            f" or at most {len(blocks)} stages (ranks x chunks)"
        )
    sizes = list(cuts) if cuts is not None else chunk_sizes(len(blocks), stages)
    if len(sizes) != stages or sum(sizes) != len(blocks) or min(sizes) < 0:
        raise UsageError(
            f"cuts {sizes} do not make {stages} stages of {len(blocks)} layers; give {stages} numbers whose sum is"
            f" {len(blocks)}"
        )
    bounds = offsets(sizes)
    if isinstance(model, (GPT, Llama)):
        kind: Any = GPTStage if isinstance(model, GPT) else LlamaStage
        made: list[Module] = [
            kind(model, a, b, number == 0, number == stages - 1) for number, (a, b) in enumerate(pairwise(bounds))
        ]
        tied = isinstance(model, GPT) or model.config.tie_word_embeddings
        return made, [model.lm_head.weight.name] if tied and stages > 1 else []
    return [LayersStage(blocks[a:b]) for a, b in pairwise(bounds)], []
