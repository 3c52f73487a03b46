"""A stage is a slice of the model: a function from the tensors that arrive to the tensors that leave.

    GPT    | wte wpe | h.0 | h.1 | h.2 | h.3 | ln_f head |     the embedding goes with the first stage, the head with
    stages |        0      |     1     |          2      |     the last; wte is on both: one parameter, two copies

Parameters keep their names in the whole model, so a stage's initial weights are those of one device.

Proved by: tests/pipeline/test_runtime.py, tests/pipeline/test_messages.py
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base import hooks
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.nn import FlatParameters, Module


class PipelineStage:
    """Stage `number` of a model: `module(*tensors)` returns one tensor, or several, which the next stage receives.

    The last stage's output goes to the loss. flats: its parameters, when the caller has made them flat.
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


def split_model(
    model: Any, stages: int, numbers: Sequence[int], cuts: Sequence[int] | None = None
) -> tuple[list[PipelineStage], list[str]]:
    """Return stages `numbers` of a model cut into `stages`, and the names of parameters that several stages share.

    model: a GPT, a Llama, an MLP, a Sequential, or another that `cut_model` can cut. cuts: how many blocks (layers)
    each stage gets; by default as equal as possible, with one more for the first stages.
    """
    modules, tied = cut_model(model, stages, cuts)
    hooks.pipeline_refusals().check_numbers(numbers, stages)
    return [PipelineStage(modules[number], number) for number in numbers], tied


def cut_model(model: Any, stages: int, cuts: Sequence[int] | None = None) -> tuple[list[Module], list[str]]:
    """Return the modules of all stages, and the names of the parameters that several share; see `split_model`.

    model.blocks: what it can be cut between. model.stage(first, last, is_first, is_last): a module that computes blocks
    first..last-1, with what comes in front of all blocks, and behind them. A parameter that two stages use is a copy of
    the same name in one of them (`nn.gpt.with_own_weight`).
    """
    refusals = hooks.pipeline_refusals()
    refusals.check_model(model, stages, cuts)
    bounds = pairwise(offsets(chunk_sizes(len(model.blocks), stages) if cuts is None else list(cuts)))
    made: list[Module] = [model.stage(a, b, n == 0, n == stages - 1) for n, (a, b) in enumerate(bounds)]
    refusals.check_stages(model, made)
    # What several stages have is tied; it goes by the name.
    counts = Counter(name for stage in made for name in {parameter.name for parameter in stage.parameters()})
    return made, [name for name, count in counts.items() if count > 1]
