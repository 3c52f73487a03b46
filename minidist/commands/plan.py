"""`minidist plan`: which layouts of a job fit on a cluster, how long a step takes, and which one is best.

Proved by: tests/commands/test_plan.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.limits import check_count
from minidist.commands.command import Argument, Option, Result, command_line, json_or_table, say
from minidist.commands.flags import above_zero, described_model, one_of, picture_file, whole_numbers

if TYPE_CHECKING:
    from minidist.planning.architecture import Architecture
    from minidist.planning.cluster.decision import Offer
    from minidist.planning.cluster.layout import ClusterLayout, Job
    from minidist.planning.cluster.search import Plan, Search
    from minidist.planning.job_config import PlannedJob

MODEL, CLUSTER, COST, OUTPUT = "Model", "Cluster and batch", "Cost", "Output"
LAYOUT = "Layout: what is given is fixed"
MAX_REFUSED = 100  # in the JSON object
DEGREES = ("dp", "tp", "pp", "cp")
BEST = 10  # layouts that are printed


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return Option(*names, help=help, panel=panel, **more)


@dataclass(frozen=True)
class ModelFlags:
    """The flags of a model's sizes; one that is not given has its default."""

    layers: Annotated[int | None, _option(MODEL, "without --model: the number of layers")] = None
    hidden: Annotated[int | None, _option(MODEL, "the hidden size")] = None
    heads: Annotated[int | None, _option(MODEL, "attention heads")] = None
    kv_heads: Annotated[int | None, _option(MODEL, "key-value heads (default: as many as heads)")] = None
    ffn: Annotated[int | None, _option(MODEL, "the size of the MLP, or of an expert (default: 4 x hidden)")] = None
    vocab: Annotated[int | None, _option(MODEL, "the vocabulary (default: 51,200)")] = None
    seq: Annotated[int | None, _option(CLUSTER, "tokens per sequence")] = None
    gated: Annotated[bool, _option(MODEL, "gated MLPs, RMS norms, no biases, as in LLaMA", "--gated")] = False
    tied: Annotated[bool | None, _option(MODEL, "the output projection is the embedding", "--tied/--untied")] = None
    experts: Annotated[int, _option(MODEL, "experts per layer")] = 0
    top_k: Annotated[int | None, _option(MODEL, "with --experts: experts per token (default: 2)")] = None

    def given(self) -> list[str]:
        """Return the flags that are given, as they are written."""
        return ["--" + one.name.replace("_", "-") for one in fields(self) if getattr(self, one.name) != one.default]


@dataclass(frozen=True)
class JobFlags:
    """The flags of what is trained on which GPUs, apart from the model."""

    gpu: Annotated[str, _option(CLUSTER, "a100-80gb, h100, h200, b200, ..., or a .json or .toml file")] = "h100"
    ranks: Annotated[
        str | None,
        _option(CLUSTER, "GPUs; several, such as 32,64,128, for a table of what each costs", "--ranks", "--gpus"),
    ] = None
    global_batch: Annotated[int | None, _option(CLUSTER, "sequences per step")] = None
    precision: Annotated[str | None, _option(CLUSTER, "fp16, bf16 (default) or fp8")] = None
    attention: Annotated[str, _option(CLUSTER, "fused (scores are never stored), flash-1, flash-2 or unfused")] = (
        "fused"
    )
    kernels: Annotated[
        str, _option(CLUSTER, "of norms, activations and the loss of gated models: fused, eager, fused-norms or any")
    ] = "any"
    framework: Annotated[str, _option(CLUSTER, "megatron, pytorch, deepspeed, scaling or any")] = "any"
    dropout: Annotated[bool, _option(CLUSTER, "blocks keep masks of dropout", "--dropout")] = False
    grad_accum_dtype: Annotated[str, _option(CLUSTER, "of the sum of gradients: fp32, bf16 or fp16")] = "fp32"
    expert_imbalance: Annotated[
        float | None,
        _option(
            CLUSTER,
            "with experts: tokens of the busiest rank, as a multiple of the mean (default: 1)",
            callback=above_zero,
        ),
    ] = None

    def over(self, file: "PlannedJob") -> "JobFlags":
        """Return the flags with what a job file says where a flag is not given."""
        return replace(
            self,
            global_batch=file.global_batch if self.global_batch is None else self.global_batch,
            precision=self.precision or file.precision,
            dropout=self.dropout or file.dropout,
        )

    def job(self, model: "Architecture", seq: int | None, gpus: int) -> "Job":
        """Return the job; UsageError for what is out of range. Nothing is missing: see `_refuse_missing`."""
        from minidist.planning.cluster.layout import ATTENTION, FRAMEWORKS, KERNELS, Job, check_length

        assert seq is not None
        assert self.global_batch is not None
        check_length(seq, model)
        check_count(self.global_batch, "--global-batch", 1, 10**9)
        return Job(
            model,
            seq,
            self.global_batch,
            self.precision or "bf16",
            gpus,
            one_of(self.attention, "--attention", ATTENTION) != "unfused",
            self.dropout,
            4 if one_of(self.grad_accum_dtype, "--grad-accum-dtype", ("fp32", "bf16", "fp16")) == "fp32" else 2,
            _imbalance(self.expert_imbalance, model),
            kernels=one_of(self.kernels, "--kernels", tuple(KERNELS)),
            attention_kernel=self.attention,
            framework=one_of(self.framework, "--framework", tuple(FRAMEWORKS)),
        )


@dataclass(frozen=True)
class CostFlags:
    """The flags of what a whole run costs."""

    tokens: Annotated[
        float | None, _option(COST, "tokens of the whole run, such as 2e12: days and GPU hours", callback=above_zero)
    ] = None
    price: Annotated[
        float | None, _option(COST, "with --tokens: of a GPU hour, in any currency: the cost", callback=above_zero)
    ] = None

    def check(self) -> None:
        """Raise UsageError for a price without the number of tokens, from which the GPU hours are computed."""
        if self.price is not None and self.tokens is None:
            raise UsageError(
                f"--price {self.price:g} is of a GPU hour, and their number is unknown; add --tokens, such as 2e12"
            )


@dataclass(frozen=True)
class LayoutFlags:
    """The flags of a layout, by the name of what they fix."""

    dp: Annotated[int | None, _option(LAYOUT, "data-parallel ranks")] = None
    tp: Annotated[int | None, _option(LAYOUT, "tensor-parallel ranks")] = None
    pp: Annotated[int | None, _option(LAYOUT, "pipeline ranks")] = None
    cp: Annotated[int | None, _option(LAYOUT, "context-parallel ranks")] = None
    ep: Annotated[int | None, _option(LAYOUT, "expert-parallel ranks")] = None
    etp: Annotated[
        int | None,
        _option(LAYOUT, "tensor-parallel ranks that share an expert (default: tp, or 1 where ep needs them)"),
    ] = None
    vp: Annotated[int | None, _option(LAYOUT, "chunks of layers per pipeline rank")] = None
    zero: Annotated[int | None, _option(LAYOUT, "ZeRO stage")] = None
    sequence_parallel: Annotated[
        bool | None, _option(LAYOUT, "norms on 1/tp of the sequence", "--sequence-parallel/--no-sequence-parallel")
    ] = None
    micro_batch: Annotated[int | None, _option(LAYOUT, "sequences of a forward pass")] = None
    recompute: Annotated[str | None, _option(LAYOUT, "none, selective, full or sqrt (which is not searched)")] = None
    offload: Annotated[
        str | None,
        _option(LAYOUT, "in host memory: none, optimizer, activations or parameters (searched when nothing fits)"),
    ] = None

    def fixed(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is given of a layout, by its field; UsageError for a number that is out of range.

        written: what a job file fixes, where no flag does.
        """
        from minidist.planning.cluster.host import CHOICES
        from minidist.planning.cluster.layout import RECOMPUTE

        given = vars(self) | {axis: written.get(axis) for axis in DEGREES if getattr(self, axis) is None}
        given = {name: value for name, value in given.items() if value is not None}
        words = {"recompute": RECOMPUTE, "offload": CHOICES}
        for name, value in given.items():
            flag = "--" + name.replace("_", "-")
            if name in words:
                one_of(value, flag, words[name])
            elif name != "sequence_parallel":
                check_count(value, flag, *((0, 3) if name == "zero" else (1, 10**6)))
        # A layout calls what is offloaded the host's part.
        return {**written, **{"host" if name == "offload" else name: value for name, value in given.items()}}


@json_or_table
def plan(
    *,
    config: Annotated[
        Path | None, Argument(help="a Hugging Face config.json, or a job file (.toml) of minidist train")
    ] = None,
    model: Annotated[str | None, _option(MODEL, "a name, such as gpt3-175b or llama-3.1-8b, or a config.json")] = None,
    sizes: ModelFlags,
    flags: JobFlags,
    cost: CostFlags,
    layout: LayoutFlags,
    explain: Annotated[
        bool, _option(OUTPUT, "print the formulas with the numbers of the best layout", "--explain")
    ] = False,
    best: Annotated[int, _option(OUTPUT, "layouts that are printed")] = BEST,
    output: Annotated[
        Path | None,
        _option(OUTPUT, "a picture of the frontier: .svg, .pdf or .png", "--output", "-o", callback=picture_file),
    ] = None,
) -> Result:
    """Find the layouts of a training job that fit on a cluster of GPUs, and what they cost."""
    from minidist.planning.architecture import missing_sizes
    from minidist.planning.cluster.decision import offers
    from minidist.planning.cluster.gpus import machine_of
    from minidist.planning.cluster.search import search

    # All that is missing is named at once.
    if config is None and model is None and (lacking := missing_sizes(vars(sizes))):
        _refuse_missing(flags, sizes.seq, layout.fixed({}), first=lacking)

    # The job: a model, a cluster, a batch. What a job file gives is as if its flags were given; flags override it.
    seq = sizes.seq
    if config is None or config.suffix != ".toml":
        architecture, written = _architecture(config, model, sizes), {}
    else:
        file = _job_file(config, model, sizes)
        architecture, flags, written = file.model, flags.over(file), file.fixed
        seq = file.model.positions if seq is None else seq

    # The layout: what is given is fixed, and the number of GPUs follows where all degrees are.
    fixed = layout.fixed(written)
    _refuse_missing(flags, seq, fixed, architecture if config or model else None)
    counts = [prod(fixed[axis] for axis in DEGREES)] if flags.ranks is None else whole_numbers(flags.ranks, "--ranks")
    for count in counts:
        check_count(count, "--ranks", 1, 10**6)
    check_count(best, "--best", 1, 1000)
    cost.check()
    job = flags.job(architecture, seq, counts[0])
    machine = machine_of(flags.gpu)
    machine.peak(job.precision)

    if len(counts) > 1:
        _refuse_of_one({"--explain": explain, "--output": output, "--best": best != BEST})
        return _decision(offers(job, machine, fixed, counts, cost.tokens, cost.price), job, fixed, flags.gpu)
    found = search(job, machine, fixed)
    _draw(found, job, output)
    shown = _shown(found)
    result = _as_dict(found, shown[:best], flags.gpu, explain) | _sizes(job) | _cost(shown[:1], cost)
    # A script sees by the exit code that nothing fits.
    return Result(result, partial(_print, shown, best, found, job, fixed, result), 0 if found.plans else 1)


def _sizes(job: "Job") -> dict[str, Any]:
    """Return the sizes of the job that --json prints, and what was not counted exactly."""
    model = job.model
    sizes = {"seq": job.length, "parameters": model.counted_parameters, "parameters_active": model.active_parameters}
    if model.projection_alone:
        sizes["parameters_with_projection"] = model.parameters
    return sizes | ({"approximations": list(model.approximations)} if model.approximations else {})


def _cost(plans: "Sequence[Plan]", cost: CostFlags) -> dict[str, dict[str, float]]:
    """Return what a run of `cost`'s number of tokens takes with the first layout; {} without that number."""
    from minidist.planning.cluster.decision import ranges, ranges_as_dict

    tokens = cost.tokens
    return ranges_as_dict(ranges(plans[0], tokens, cost.price)) if plans and tokens is not None else {}


def _refuse_of_one(flags: Mapping[str, object]) -> None:
    """Raise UsageError for a flag about the layouts of one number of GPUs."""
    for flag, given in flags.items():
        if given:
            raise UsageError(f"{flag} is about one number of GPUs, and --ranks has several; give one, or leave it out")


def _decision(found: "Sequence[Offer]", job: "Job", fixed: Mapping[str, Any], gpu: str) -> Result:
    """Return what several numbers of GPUs cost, and the commands for the smallest one that surely fits."""
    from minidist.planning.cluster.decision import answer, offers_table, smallest
    from minidist.planning.cluster.gpus import machine_of
    from minidist.planning.cluster.tables import title

    machine = machine_of(gpu)
    first = smallest(found) or next((offer for offer in found if offer.plan is not None), None)
    sentence = answer(found, job, machine, fixed)
    commands = {} if first is None or first.plan is None else _commands(first.plan, gpu)
    result = {
        "counts": [offer.as_dict() for offer in found],
        "smallest_that_fits": None if first is None or first.verdict != "yes" else first.gpus,
        "answer": sentence,
        "commands": commands,
        **_sizes(job),
    }

    def show() -> None:
        print(f"{title(job)}, {machine.name}")
        print(offers_table(found))
        print(f"{sentence}.")
        if first is not None:
            _print_commands(commands, f"the layout on {first.gpus:,}")

    return Result(result, show, 1 if first is None else 0)


def _shown(found: "Search") -> "list[Plan]":
    """Return the layouts that are printed: those that fit, or the only one that is possible."""
    return found.plans or (found.too_large if len(found.too_large) == 1 else [])


def _as_dict(found: "Search", shown: "list[Plan]", gpu: str, explain: bool) -> dict[str, Any]:
    """Return what --json prints of a search. shown: the layouts that are printed."""
    from minidist.planning.cluster.tables import equally_fast, explanation

    result: dict[str, Any] = {
        "layouts": [one.as_dict() for one in shown],
        "layouts_total": len(found.plans),
        "equal_within_error": equally_fast(found.plans) if found.plans else 0,
        "refused": [{**layout.as_dict(), "reason": reason} for layout, reason in _some_refused(found)],
        "refused_total": {"too_large": len(found.too_large), "impossible": len(found.impossible)},
        "commands": _commands(shown[0], gpu) if shown else {},
    }
    if explain:
        result["explanation"] = explanation(shown[0]) if shown else []
    return result


def _refuse_missing(
    flags: JobFlags, seq: int | None, fixed: Mapping[str, Any], model: "Architecture | None" = None, first: str = ""
) -> None:
    """Raise UsageError for what a job lacks, all at once. model: one with a name. first: what its model lacks."""
    from minidist.planning.cluster.layout import length_to_give

    lacking = [first] if first else []
    if flags.ranks is None and not fixed.keys() >= {*DEGREES}:
        lacking.append("the number of GPUs is missing; give --ranks, or all of --dp, --tp, --pp and --cp")
    if seq is None:
        lacking.append(f"the length of the sequences is missing; {length_to_give(model)}")
    if flags.global_batch is None:
        lacking.append("the batch is missing; give --global-batch, the sequences of a step")
    if lacking:
        raise UsageError("; ".join(lacking))


def _some_refused(found: "Search") -> "list[tuple[ClusterLayout, str]]":
    """Return some layouts that cannot be used with the reasons, of both kinds where there are both."""
    impossible = found.impossible[: max(MAX_REFUSED // 2, MAX_REFUSED - len(found.too_large))]
    large = [(plan.layout, plan.shortage) for plan in found.too_large[: MAX_REFUSED - len(impossible)]]
    return large + impossible


def _imbalance(given: float | None, model: "Architecture") -> float:
    """Return the imbalance of experts, which is at most that of a rank whose experts all tokens choose."""
    if given is None:
        return 1.0
    if not model.experts:
        raise UsageError(f"--expert-imbalance {given:g} needs a model with experts; leave it out")
    most = model.experts / model.top_k
    if not 1 <= given <= most:
        raise UsageError(
            f"--expert-imbalance {given:g} is out of range: the busiest rank has at least the mean, and at most all"
            f" tokens; give 1 to {most:g}"
        )
    return given


def _job_file(config: Path, model: str | None, sizes: ModelFlags) -> "PlannedJob":
    """Return the job of a file; UsageError when a flag describes another model."""
    from minidist.planning.job_config import read_job

    _refuse_other_models([*["--model"] * (model is not None), *sizes.given()], config)
    return read_job(config)


def _refuse_other_models(flags: Sequence[str], model: object) -> None:
    """Raise UsageError for the first of the flags that describe another model than the one that is given."""
    for flag in flags:
        raise UsageError(f"{flag} describes a model, and {quoted_path(model)} is one; leave one out")


def _commands(best: "Plan", gpu: str) -> dict[str, str]:
    """Return the commands that try a layout with minidist itself, or why there is none."""
    from minidist.planning.cluster.ready_commands import compare_command, differences, dry_run_command, no_command

    reason = no_command(best.layout, best.job)
    compare = {"compare": compare_command(best.layout, best.job)}
    if reason is not None:
        return {**compare, "no_dry_run": reason}
    return {
        "dry_run": dry_run_command(best.layout, best.job, gpu),
        **compare,
        "dry_run_differs": "; ".join(differences(best.layout, best.job)),
    }


def _architecture(config: Path | None, model: str | None, sizes: ModelFlags) -> "Architecture":
    """Return the model of a file, of a name, or of sizes given as flags."""
    from minidist.planning.architecture import MODELS, from_sizes

    if config is None and model is None:
        return from_sizes(vars(sizes))
    if config is not None and model is not None:
        raise UsageError(
            f"the model is given twice, as {quoted_path(config)} and --model {quoted(model)}; leave one out"
        )
    # The tokens per sequence may be fewer than the model has positions.
    _refuse_other_models([flag for flag in sizes.given() if flag != "--seq"], config or model)
    if config is not None and config.suffix != ".json" and not config.exists():
        given = str(config)
        name, near = (given, "") if given in MODELS else ("NAME", nearest(given, MODELS))
        raise UsageError(f"there is no file {quoted_path(config)}; give a config.json, or --model {name}{near}")
    return described_model(str(model) if config is None else config)


def _draw(found: "Search", job: "Job", output: Path | None) -> None:
    """Save the picture of the frontier, where one is asked for."""
    if output is None:
        return
    from minidist.planning.cluster.calibration import CALIBRATION
    from minidist.report.frame import save
    from minidist.report.frontier import frontier

    if not found.plans:
        raise UsageError(f"no layout fits, so there is nothing to draw in {quoted_path(output)}; add GPUs")
    layouts = [plan.as_dict() for plan in found.plans]
    title = f"{len(layouts):,} layouts of {job.gpus:,} GPUs"
    first = found.plans[0]
    memory = first.machine.memory - CALIBRATION.reserved_bytes
    say(f"written: {save(frontier(layouts, memory=memory, title=title, command=command_line()), output)}")


def _print(
    shown: "list[Plan]", best: int, found: "Search", job: "Job", fixed: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    """Print the layouts, the best one in detail, and what does not fit. result: what --json prints."""
    from minidist.planning.cluster.search import reason_for, remedies
    from minidist.planning.cluster.tables import advice, best_table, cost_lines, header, layouts_table, refused_table

    if not found.plans:
        first = found.too_large[0]
        if shown:
            print(header(job, [], first.machine.name))
            print(layouts_table(shown, best))
            print(best_table(first))
        print(refused_table(found))
        print(advice(found, remedies(job, first.machine, fixed), job.gpus))
    else:
        print(header(job, found.plans, shown[0].machine.name))
        print(layouts_table(found.plans, best))
        print(best_table(shown[0]))
        for line in cost_lines(result):
            print(line)
        print(f"why the first: {reason_for(shown[0], found.plans, fixed)}")
        _print_commands(result["commands"])
        refused = refused_table(found)
        if refused:
            print(refused)
    for line in result.get("explanation", []):
        print(line)


def _print_commands(commands: Mapping[str, str], what: str = "the first") -> None:
    """Print the commands that try a layout."""
    if "no_dry_run" in commands:
        print(f"no dry run of {what}: {commands['no_dry_run']}")
    else:
        print(f"dry run of {what}:\n  {commands['dry_run']}")
        print(f"  It differs from the plan by: {commands['dry_run_differs']}.")
    print(f"its axes on a small model, compared with one device:\n  {commands['compare']}")
