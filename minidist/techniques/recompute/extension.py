"""`--recompute`: activations are not kept, but computed again in backward.

    none        | h.0 | h.1 | h.2 | h.3 |     every activation is kept
    full        |.    |.    |.    |.    |     each block keeps its input, and runs again when backward comes to it
    sqrt        |.          |.          |     the same for segments of blocks
    budget:N    |.    |.          |     |     as few segments as keep at most N bytes
    selective   | a   | a   | a   | a   |     attention's core runs again, everything else is kept
    stages:0    |. ........ |     |     |     the same for whole stages of a pipeline, here the first of two

Messages inside a block are sent again. The plan of a pipeline runs the forward pass of a whole stage again with `full`,
so nothing inside the stage does, unless a technique keeps the blocks' inputs elsewhere.

A rank sends per step: the messages of a forward pass that runs again once more (`--tp`, `--cp`, `--ep`, and ZeRO 3's
gathers in a pipeline); else nothing.
Equal to: one device, bit for bit.
Lesson: 02_what_a_step_costs, 10_accumulate_and_recompute, 16_naive_pipeline_and_gpipe.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py, tests/config/test_rules.py
"""

from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import MAX_COUNT, whole_number
from minidist.core.parallel.dims import Axes
from minidist.nn.buffers import named_buffers
from minidist.parallel.fitting_dims import splits_sums
from minidist.techniques import Extension, Field, Record, Rule, packs_inputs


def stages_of(text: str) -> tuple[int, ...]:
    """Return the stages of "stages:0,2", nothing for another choice; UsageError for what is no list of numbers."""
    word, _, listed = text.partition(":")
    if word != "stages":
        return ()
    stages = [whole_number(part) for part in listed.split(",")]
    if None in stages:
        raise UsageError(f"--recompute {quoted(text)}; write the numbers of stages, such as stages:0,1")
    return tuple(sorted({stage for stage in stages if stage is not None}))


def _budget(job: Any) -> int | None:
    """Return N of "budget:N", None for the other choices."""
    from minidist.nn.recompute import budget_of

    return None if stages_of(job.recompute) else budget_of(job.recompute)


class Recompute(Extension):
    """Lets blocks, segments of blocks or attention run again in backward."""

    class Settings(Record):
        recompute: str = Field(
            "none",
            description="activations recomputed in backward: none, full, selective, sqrt, budget:BYTES, or stages:LIST"
            " of a pipeline, such as stages:0,1",
        )

    panel = "Precision and memory"
    rules = (
        Rule(
            "own-model-with-recomputation",
            lambda j: j.is_own_model and j.recompute != "none",
            "--recompute {recompute} runs blocks of a model again, and minidist does not know the blocks of --model"
            " {model}",
            "call minidist.nn.ops.checkpoint in its forward, or leave it out",
        ),
        Rule(
            "selective-needs-attention",
            lambda j: j.recompute == "selective" and j.is_classifier,
            "--recompute selective recomputes attention, which --model {model} does not have",
            "use --recompute full",
        ),
        Rule(
            "budget-needs-equal-blocks",
            lambda j: j.model == "mlp" and _budget(j) is not None,
            "--recompute {recompute} measures one block and assumes that the others are equal, which the layers of an"
            " MLP are not",
            "use --recompute sqrt or full",
        ),
        Rule(
            "segments-in-a-pipeline",
            lambda j: j.pp > 1 and (_budget(j) is not None or j.recompute == "sqrt"),
            "not implemented: --recompute {recompute} cuts a model into segments, and a pipeline recomputes whole"
            " stages",
            "use full or selective",
        ),
        Rule(
            "recomputed-stages-need-a-pipeline",
            lambda j: j.pp == 1 and bool(stages_of(j.recompute)),
            "--recompute {recompute} names stages of a pipeline, and without --pp there are none",
            "add --pp 2 or more, or use full",
        ),
        Rule(
            "recomputed-stages-with-packed-inputs",
            lambda j: bool(stages_of(j.recompute)) and packs_inputs(j.config),
            "not implemented: --recompute {recompute} runs whole stages again, and the inputs of their blocks wait"
            " elsewhere",
            "use --recompute full",
        ),
        Rule(
            "budget-with-messages-in-blocks",
            lambda j: _budget(j) is not None and splits_sums(j.dims),
            "--recompute {recompute} runs a block once to measure what it keeps, and with --tp, --cp or --ep a block"
            " sends messages",
            "use sqrt or full",
        ),
    )

    def recomputes(self) -> str:
        return "none" if stages_of(self.settings.recompute) else str(self.settings.recompute)

    def replays(self, config: Any) -> tuple[int, ...] | range:
        # Where a technique keeps the inputs of blocks, the blocks themselves run their forward pass again.
        whole = self.settings.recompute == "full" and not packs_inputs(config)
        return range(MAX_COUNT) if whole else stages_of(self.settings.recompute)

    def layers_split(self, job: Any, axes: Axes) -> None:
        what = self.recomputes()
        # A technique may let the kept inputs wait elsewhere.
        pack = next((extension.pack for extension in job.extensions if extension.packs_inputs()), None)
        if job.config.pp > 1 and what != "selective" and pack is None:
            return
        from minidist.nn.recompute import recompute

        buffers = dict(named_buffers(job.model))
        recompute(job.model, what, pack, (job.batches.micro_batch, *job.activation_shape), job.dtype)

        # A budget measures a block by running it, which is not a part of the training.
        for extension in job.extensions:
            extension.forget()
        job.model.load_state_dict(buffers, strict=False)
