"""A stage is a slice of the model: a function from the tensors that arrive to the tensors that leave.

    GPT    | wte wpe | h.0 | h.1 | h.2 | h.3 | ln_f head |     the embedding goes with the first stage, the head with
    stages |        0      |     1     |          2      |     the last; wte is on both: one parameter, two copies

Parameters keep their names in the whole model, so a stage's initial weights are those of one device.

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from minidist.autograd import Function, Parameter, Tensor
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.layout import chunk_sizes, offsets
from minidist.nn import GPT, Llama, Module
from minidist.nn.flat import FlatParameters
from minidist.nn.gpt import auxiliary_losses


@dataclass(frozen=True)
class SkipConnection:
    """An output stashed for `stage`, past the neighbour: that stage gets it behind what its own neighbour sends.

    It travels once each way, B bytes and B bytes of gradient, whatever number of stages lies between; they hold nothing
    of it.
    """

    stage: int
    tensor: Tensor


class PipelineStage:
    """Stage `number` of a model: `module(*tensors)` returns one tensor, or several, which the next stage receives.

    A tensor that a later stage needs is returned as `SkipConnection(stage, tensor)`; that stage's module gets it after
    the tensors of the stage before it, several in the order of the stages that they come from. A stage may have no
    parameters. The last stage's output goes to the loss. flats: its parameters, when the caller has made them flat.
    """

    def __init__(self, module: Any, number: int, flats: Sequence[FlatParameters] | None = None) -> None:
        self.module, self.number = module, number
        parameters = list(module.parameters()) if hasattr(module, "parameters") else []
        self.flats = [FlatParameters(parameters)] if flats is None else list(flats)

    @property
    def flat(self) -> FlatParameters:
        """Its flat parameters, when they are one unit."""
        (flat,) = self.flats
        return flat

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters of all its units."""
        return [parameter for flat in self.flats for parameter in flat.parameters]

    def separate(self, names: Sequence[str]) -> FlatParameters | None:
        """Make its parameters of these names a flat unit of their own, behind the rest; None when it has none."""
        separated = [p for p in self.parameters if p.requires_grad and p.name in names]
        if not separated:
            return None
        own = [p for p in self.parameters if p not in separated]
        for parameter in self.parameters:
            parameter.flat = None  # of the unit that the two replace
        self.flats = [FlatParameters(own), FlatParameters(separated)]
        return self.flats[1]


# --- a stage's forward and backward, as autograd sees them ---


def has_gradient(dtype: np.dtype[Any]) -> bool:
    """Whether tensors of this dtype have gradients: floats do (bfloat16's kind is "V"), numbers of tokens do not."""
    return dtype.kind in "fV"


def outputs_by_target(result: Any, stage: int) -> dict[int, list[Tensor]]:
    """Return a module's outputs by the stage that they go to: the next one, where they are not skip connections."""
    outputs: dict[int, list[Tensor]] = {stage + 1: []}
    for value in result if isinstance(result, (tuple, list)) else [result]:
        if isinstance(value, SkipConnection):
            outputs.setdefault(value.stage, []).append(value.tensor)
            value = value.tensor
        else:
            outputs[stage + 1].append(value)
        # What a neighbour receives has a shape and a dtype: names, None and plain numbers have none.
        if not isinstance(value, Tensor):
            raise UsageError(
                f"stage {stage} (or the loss after it) returned {_kind(value)} where a Tensor is needed; return a"
                " Tensor, or a tuple of Tensors and SkipConnection(stage, tensor)"
            )
    return outputs


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def backward_from(outputs: Sequence[Tensor], gradients: Sequence[Any], weights: str) -> Any:
    """Run backward from several outputs in one pass, which visits what they share once.

    weights: "now" or "deferred"; deferred weight gradients are returned.
    """
    roots, seeds = list[Tensor](), []
    for output, gradient in zip(outputs, gradients, strict=True):
        if output.node is not None:
            roots.append(output)
            seeds.append(gradient)
    if not roots:
        return None  # nothing in the stage is trained and nothing before it either
    if len(roots) == 1:
        return roots[0].backward(seeds[0], weight_gradients=weights)
    return _Together.apply(seeds, *roots).backward(weight_gradients=weights)


class _Together(Function):
    """Several outputs of one stage as one root."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *outputs: Any) -> Any:
        ctx.gradients = gradients
        return np.zeros((), outputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return tuple(ctx.gradients)


# --- stages of the models of nn ---


class GPTStage(Module):
    """Blocks first..last-1 of a GPT, with the embedding in front or the head behind."""

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
        """Return activations (batch, T, D), or logits on the last stage, from tokens or activations.

        With experts also the sum of their auxiliary losses so far, shape (1,).
        """
        if self.embeds:
            x = self._embed(x)
        for block in self.h:
            x = block(x)
        out = self.head(self.ln_f(x)) if self.heads else x
        return (out, auxiliary_losses(self.h, auxiliary)) if self.experts else out


class LlamaStage(Module):
    """Blocks first..last-1 of a Llama, with the embedding in front or the head behind."""

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
        """Return activations (batch, T, width), or logits on the last stage, from tokens or activations."""
        angles = self.rotary_emb(xp.arange(x.shape[1]))
        if self.embeds:
            x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x, angles)
        result: Tensor = self.head(self.norm(x)) if self.heads else x
        return result


def with_own_weight(head: Any) -> Any:
    """Return a tied head with a copy of its weight, for a stage that does not have the embedding."""
    head, shared = copy(head), head.weight
    head.weight = Parameter(xp.array(shared.data), shared.requires_grad, shared.name, shared.init)
    head.weight.layout = shared.layout
    return head


class LayersStage(Module):
    """Some of an MLP's layers."""

    def __init__(self, layers: Sequence[Module]) -> None:
        self.layers = list(layers)

    def forward(self, x: Any) -> Any:
        """Return the last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x


def split_model(
    model: Module, stages: int, numbers: Sequence[int], cuts: Sequence[int] | None = None
) -> tuple[list[PipelineStage], list[str]]:
    """Return stages `numbers` of a model cut into `stages`, and the names of parameters that several stages share.

    model: a GPT, a Llama or an MLP. cuts: how many blocks (layers) each stage gets; by default as equal as possible,
    the first ones one more. Raises UsageError when there are more stages than blocks, or the cuts do not add up.
    """
    modules, tied = cut_model(model, stages, cuts)
    return [PipelineStage(modules[number], number) for number in numbers], tied


def blocks_per_stage(blocks: int, stages: int, cuts: Sequence[int] | None = None) -> list[int]:
    """Return how many of `blocks` blocks each stage gets; see `split_model`, which raises the same UsageError."""
    if cuts is None and stages > blocks:
        raise UsageError(
            f"cannot cut {blocks} layers into {stages} stages: a stage needs at least one; use --layers {stages},"
            f" or at most {blocks} stages (ranks x chunks)"
        )
    sizes = list(cuts) if cuts is not None else chunk_sizes(blocks, stages)
    if len(sizes) != stages or sum(sizes) != blocks or min(sizes) < 0:
        raise UsageError(
            f"cuts {sizes} do not make {stages} stages of {blocks} layers; give {stages} numbers whose sum is {blocks}"
        )
    return sizes


def cut_model(model: Module, stages: int, cuts: Sequence[int] | None = None) -> tuple[list[Module], list[str]]:
    """Return the modules of all stages, and the names of the parameters that several share; see `split_model`."""
    blocks = list(getattr(model, "blocks", ()))
    if not blocks:
        raise UsageError(f"cannot cut a {type(model).__name__}; make PipelineStages of its parts yourself")
    sizes = blocks_per_stage(len(blocks), stages, cuts)

    # A language model's first stage embeds and its last one has the head, which may share the embedding's weight.
    bounds = list(pairwise(offsets(sizes)))
    if isinstance(model, (GPT, Llama)):
        kind: Any = GPTStage if isinstance(model, GPT) else LlamaStage
        made: list[Module] = [kind(model, a, b, n == 0, n == stages - 1) for n, (a, b) in enumerate(bounds)]
        tied = isinstance(model, GPT) or model.config.tie_word_embeddings
        head: Any = model.lm_head
        return made, [head.weight.name] if tied and stages > 1 else []
    return [LayersStage(blocks[a:b]) for a, b in bounds], []
