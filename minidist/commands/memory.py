"""`minidist memory`: the bytes of a rank on paper, for a model in a layout or for any number of parameters.

Proved by: tests/planning/test_zero_stages.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.file_format import format_of
from minidist.base.limits import check_count
from minidist.commands.command import Option, Result, command_line, json_or_table, say
from minidist.commands.flags import described_model, one_of

if TYPE_CHECKING:
    from minidist.planning.cluster.fit import Fit
    from minidist.planning.cluster.layout import ClusterLayout, Job

AXES = ("dp", "tp", "pp", "cp", "ep")
ACTIVATIONS = ("batch", "attention", "dropout", "recompute", "kernels", "prefetch", "gpu")


@dataclass(frozen=True)
class StepFlags:
    """The flags of a model's step: its layout, its batch, and what is counted."""

    dp: Annotated[int, Option("--dp", "--ranks", help="data-parallel ranks")] = 1
    tp: Annotated[int, Option(help="with --model: tensor-parallel ranks (with sequence parallelism)")] = 1
    pp: Annotated[int, Option(help="with --model: pipeline ranks; the fullest one is shown")] = 1
    cp: Annotated[int, Option(help="with --model: context-parallel ranks")] = 1
    ep: Annotated[int, Option(help="with --model: expert-parallel ranks")] = 1
    batch: Annotated[int, Option(help="with --model: sequences per forward pass of a rank")] = 1
    seq: Annotated[
        int | None, Option(help="with --model: tokens per sequence; without it model states alone are counted")
    ] = None
    attention: Annotated[
        str, Option(help="with --model: fused, flash-1, flash-2 (scores are never stored) or unfused")
    ] = "fused"
    kernels: Annotated[
        str, Option(help="with --gpu: kernels of norms and gated activations: fused, eager, fused-norms or any")
    ] = "any"
    dropout: Annotated[bool, Option("--dropout", help="with --model: blocks keep masks of dropout")] = False
    accounting: Annotated[
        str | None,
        Option(help="zero (default with --params), megatron (default with --model), fp32-accumulation, deepspeed"),
    ] = None
    recompute: Annotated[str, Option(help="with --model: none, selective, full or sqrt")] = "none"
    prefetch: Annotated[int, Option(help="with --model: blocks that ZeRO 3 gathers ahead")] = 1
    gpu: Annotated[
        str | None, Option(help="with --model: such as h100; prints which ZeRO stages fit; exit code 1 if none does")
    ] = None

    def planned(self, name: str) -> "tuple[Job, ClusterLayout]":
        """Return the job and the layout as `minidist plan` has them, with enough micro-batches to fill the pipeline.

        Without --seq the sequences have the fewest tokens that the layout can divide; model states do not depend on it.
        """
        from minidist.planning.cluster import layout as of

        model = described_model(name)
        for flag in (*AXES, "batch"):
            check_count(getattr(self, flag), f"--{flag}", 1, 10**6)
        check_count(self.prefetch, "--prefetch", 0, model.layers)
        one_of(self.recompute, "--recompute", of.RECOMPUTE)
        fused = one_of(self.attention, "--attention", of.ATTENTION) != "unfused"
        kernels = one_of(self.kernels, "--kernels", tuple(of.KERNELS))
        dp, tp, pp, cp, ep = (getattr(self, axis) for axis in AXES)
        if self.seq is None:
            self.refuse_activations(f"needs the length of the sequences; {of.length_to_give(model)}")
            length = 2 * cp * tp
        else:
            of.check_length(self.seq, model)
            length = self.seq
        layout = of.ClusterLayout(dp, tp, pp, cp, ep, 1, 0, tp > 1, self.batch, pp, self.recompute)
        job = of.Job(
            *(model, length, dp * self.batch * pp, "bf16", layout.ranks, fused, self.dropout),
            prefetch=self.prefetch,
            kernels=kernels,
        )
        return job, layout

    def check_deepspeed(self) -> None:
        """Raise UsageError for what DeepSpeed's estimates, which are of data-parallel ranks, do not count."""
        if self.accounting != "deepspeed":
            return
        why = "has no effect with --accounting deepspeed; leave one of them out"
        self.refuse_activations(why, (*AXES[1:], "prefetch"))

    def refuse_activations(self, why: str, names: Sequence[str] = ACTIVATIONS) -> None:
        """Raise UsageError for the first flag that has no use where activations are unknown.

        why: the rest of the sentence.
        """
        for name in (name for name in names if getattr(self, name) != getattr(StepFlags, name)):
            value = getattr(self, name)
            raise UsageError(f"--{name} {why}" if value is True else f"--{name} {quoted(value, marks=False)} {why}")


@json_or_table
def memory(
    *,
    params: Annotated[str | None, Option(help="number of parameters, such as 7.5e9 or 7.5B")] = None,
    model: Annotated[str | None, Option(help="a name, such as gpt3-175b or llama-3.1-8b, or a config.json")] = None,
    flags: StepFlags,
    form: Annotated[
        str | None, Option("--format", help="on standard output: text (default) or svg (the ZeRO bars)")
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="draw the ZeRO bars into an .svg, .pdf or .png file")
    ] = None,
) -> Result:
    """Calculate how many bytes a rank holds at each ZeRO stage, for some parameters or for a whole step of a model."""
    from minidist.planning.zero_stages import deepspeed_offload, model_states, whole_number
    from minidist.report.frame import SUFFIXES

    if (params is None) == (model is None):
        raise UsageError("give either --params NUMBER (model states) or --model NAME (the whole peak of a step)")
    if form not in (None, "text", "svg"):
        raise UsageError(f"--format {quoted(form)}; it must be text or svg")
    if output is not None and form == "text":
        raise UsageError(f"--format text contradicts --output {quoted_path(output)}; leave one of them out")
    form = format_of(output, None, {"svg": SUFFIXES}, form or "text")
    ranks = flags.dp * flags.tp * flags.pp * flags.cp
    accounting = flags.accounting or ("zero" if model is None else "megatron")
    title = f"{model or params}{{}} on {ranks} rank{'s' * (ranks != 1)}, {accounting} accounting"

    # A model's whole step, or the model states of a bare number of parameters, which has no activations.
    fits: dict[str, Fit] = {}
    if model is not None:
        flags.check_deepspeed()
        job, layout = flags.planned(model)
        stages, fits = _of_model(model, job, layout, accounting, flags)
        if flags.seq is not None:
            title += f", {layout.micro_batch} x {job.length:,} tokens in a forward pass"
    else:
        flags.refuse_activations(
            "is about a model's activations, which --params does not tell; give --model NAME",
            (*AXES[1:], "seq", *ACTIVATIONS),
        )
        number = whole_number(params or "")
        stages = dict(model_states(number, flags.dp, accounting))
        if accounting == "deepspeed":
            stages["offload"] = deepspeed_offload(number, flags.dp)

    # A file is written with --json, too. A script sees by the exit code that no stage fits.
    code = int(bool(fits) and not any(fit.fits for fit in fits.values()))
    show = partial(_print, stages, title.format(""), accounting, fits)
    if form == "svg":
        show = partial(_draw, stages, title.format(" parameters"), output)
    if output is None:
        return Result(stages, show, code)
    show()
    return Result(stages, lambda: None, code)


def _of_model(
    name: str, job: "Job", layout: "ClusterLayout", accounting: str, flags: StepFlags
) -> "tuple[dict[str, Any], dict[str, Fit]]":
    """Return the stages of a model as --json prints them, and whether each fits on a GPU."""
    from minidist.planning.cluster.fit import Fit, not_counted
    from minidist.planning.cluster.gpus import machine_of
    from minidist.planning.cluster.layout import length_to_give
    from minidist.planning.zero_stages import STATES, block_forms, deepspeed_offload, layout_stages, with_total

    model, fits = job.model, dict[str, Fit]()
    stages: dict[str, Any] = {"model": name, "parameters": model.counted_parameters}
    if model.projection_alone:
        stages["parameters_with_projection"] = model.parameters
    ranks = layout_stages(job, layout, accounting)
    if flags.seq is None:
        stages |= {stage: with_total({kind: rank.by_kind[kind] for kind in STATES}) for stage, rank in ranks.items()}
        stages["not_counted"] = f"not counted: activations, which depend on the length; {length_to_give(model)}"
    else:
        block = block_forms(job, layout.micro_batch)
        stages |= {"seq": job.length} | ({} if block is None else {"activations_of_a_block": block})
        stages |= {stage: with_total(rank.by_kind) for stage, rank in ranks.items()}
        stages["not_counted"] = not_counted()
    if accounting == "deepspeed":
        stages["offload"] = deepspeed_offload(model.parameters, layout.dp, model.largest_module)
    if flags.gpu is not None:
        machine = machine_of(flags.gpu)
        fits = {stage: Fit.of_rank(machine, rank, job) for stage, rank in ranks.items()}
        stages["fits"] = {stage: fit.verdict for stage, fit in fits.items()}
    return stages, fits


def _draw(stages: dict[str, Any], title: str, output: Path | None) -> None:
    """Draw the ZeRO bars into `output`, or write the SVG to standard output."""
    from minidist.report.frame import save
    from minidist.report.zero_bars import zero_bars

    figure = zero_bars(stages, title=title, command=command_line())
    if output:
        say(f"written: {save(figure, output)}")
        return
    with TemporaryDirectory() as folder:
        print(save(figure, Path(folder) / "bars.svg").read_text(encoding="utf-8"))


def _print(stages: dict[str, Any], title: str, accounting: str, fits: "dict[str, Fit]") -> None:
    """Print the stages as tables, what fits, and what the accounting leaves out."""
    from minidist.planning.zero_stages import block_sentence, offload_table, table

    print(title)
    print(table(stages))
    if fits:
        print(f"  {'fits':16}" + "".join(f"{fit.verdict:>12}" for fit in fits.values()))
        for stage, fit in fits.items():
            print(f"{fit.needs(stage)}: {fit.room}")
    if "offload" in stages:
        print(offload_table(stages["offload"]))
    if "activations_of_a_block" in stages:
        print(block_sentence(stages["activations_of_a_block"]))
    if "not_counted" in stages:
        print(stages["not_counted"])
    elif accounting == "deepspeed":
        print(
            "DeepSpeed's stage 3 adds 4 bytes for each parameter of the largest layer, which --params cannot tell; use"
            " --model"
        )
