"""The command line: parsing and printing, nothing else.

Every flag of `train` and `compare` is a field of TrainConfig. `--json` prints one JSON object on standard output and
nothing else there; progress and errors go to standard error. Exit codes: 0 done, 1 a difference or a failed run, 2
wrong input.
"""

import inspect
import json
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from minidist import __version__
from minidist.base.errors import MinidistError, UsageError, nearest
from minidist.comm.launch import tune, writable
from minidist.config.train_config import TrainConfig, flag

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Distributed training that you can read, run on a laptop, and check.",
)
bench_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Ratios measured in one interleaved run.")
app.add_typer(bench_app, name="bench")

Ranks = Annotated[
    int | None, typer.Option(help="virtual ranks (default: the product of the degrees); not under mpiexec")
]
Timeout = Annotated[float, typer.Option(help="seconds until a silent rank is reported")]
TraceFile = Annotated[Path | None, typer.Option(help="where the trace goes")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
DeepSpeed = Annotated[Path | None, typer.Option(help="a DeepSpeed configuration file; what is not honoured is listed")]
Eager = Annotated[int, typer.Option(help="simulated: sends of up to so many bytes are buffered")]


def takes_config(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command `--config`, `--set` and a flag for each field of TrainConfig; it receives them as its first
    argument, a TrainConfig.
    """
    own = inspect.signature(function)
    fields = []
    for name, info in TrainConfig.model_fields.items():
        kind = info.annotation
        text = info.description or ""
        if getattr(kind, "__origin__", None) is not None and kind is not None and "Literal" in str(kind):
            text, kind = f"{text} [{'|'.join(kind.__args__)}]", str
        option = typer.Option(*((flag(name),) if kind is bool else ()), help=text, rich_help_panel="Job")
        fields.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=info.default, annotation=Annotated[kind, option]
            )
        )
    rest = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in list(own.parameters.values())[1:]]
    file = typer.Option("--config", help="a .toml or .json file of settings; flags override it", rich_help_panel="Job")
    fields.insert(
        0,
        inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file]
        ),
    )

    one = typer.Option(
        "--set",
        help="KEY=VALUE by the file's name of a setting, such as axes.tp=4; overrides the file",
        rich_help_panel="Job",
    )
    fields.insert(
        1,
        inspect.Parameter(
            "overrides", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, one]
        ),
    )

    def command(**values: Any) -> None:
        path, overrides = values.pop("config"), values.pop("overrides")
        settings = {name: values.pop(name) for name in TrainConfig.model_fields}
        if path is not None or overrides:
            from minidist.config.config_file import read_config, read_overrides

            given, written = given_flags(), {} if path is None else read_config(path)
            written.update(read_overrides(overrides or ()))
            settings.update({name: value for name, value in written.items() if name not in given})
        config = TrainConfig.make(**settings)
        function(config, **values)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature([*fields, *rest])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*fields, *rest)}
    return command


def with_deepspeed(config: TrainConfig, path: Path | None) -> TrainConfig:
    """The job with the file's settings in it; the first process says which keys are not honoured."""
    if path is None:
        return config
    from minidist.comm.launched import launched_rank
    from minidist.config.deepspeed import honour, read_deepspeed

    translation = read_deepspeed(path)
    if translation.ignored and launched_rank() == 0:
        say(translation.warning())
    return honour(config, translation, given_flags())


def say(text: str = "") -> None:
    """A line for people: standard error, so that standard output is free for JSON."""
    print(text, file=sys.stderr, flush=True)


@app.command()
@takes_config
def train(
    config: TrainConfig,
    ranks: Ranks = None,
    timeout: Timeout = 60.0,
    trace: TraceFile = None,
    eager_bytes: Eager = 0,
    metrics: Annotated[Path | None, typer.Option(help="a file of JSON lines, one a step")] = None,
    deepspeed: DeepSpeed = None,
    json_output: Json = False,
) -> None:
    """Train a model on virtual ranks, or, under mpiexec, as one of its ranks."""
    from minidist.commands.runner import run_training

    config = with_deepspeed(config, deepspeed)

    summary = run_training(
        config, ranks, timeout, trace or Path("runs/train.jsonl"), eager_bytes, command_line(), metrics
    )
    if summary is None:
        return
    if json_output:
        print(json.dumps(summary.as_dict()))
        return
    say(summary.table())
    say(
        f"trace: {summary.trace}   picture: minidist report {summary.trace} --picture space-time -o runs/space-time.svg"
    )


@app.command()
@takes_config
def compare(
    config: TrainConfig,
    ranks: Ranks = None,
    timeout: Timeout = 60.0,
    trace: TraceFile = None,
    eager_bytes: Eager = 0,
    deepspeed: DeepSpeed = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="every valid layout of --ranks (default 8) on a small GPT")
    ] = False,
    sample: Annotated[int | None, typer.Option(help="with --matrix: so many layouts, as different as can be")] = None,
    processes: Annotated[int, typer.Option(help="with --matrix: processes that share the layouts")] = 1,
    json_output: Json = False,
) -> None:
    """Run the job in parallel and on one device, and compare every tensor of every step. Exit code 1 when they differ."""
    from minidist.commands.runner import run_comparison

    if matrix:
        compare_matrix(config, 8 if ranks is None else ranks, sample, processes, json_output)
    for name in ("sample", "processes"):
        if name in given_flags():
            raise UsageError(f"--{name} is a number of layouts or processes of --matrix; add --matrix, or leave it out")

    config = with_deepspeed(config, deepspeed)

    if "reduction" not in given_flags():
        config = config.model_copy(update={"reduction": "ordered"})
    verdict = run_comparison(config, ranks, timeout, eager_bytes, trace, command_line())
    if verdict is None:
        return
    if json_output:
        print(json.dumps(verdict.as_dict()))
    else:
        say(verdict.sentence())
    raise typer.Exit(0 if verdict.equal else 1)


def compare_matrix(config: TrainConfig, ranks: int, sample: int | None, processes: int, json_output: bool) -> None:
    """Every valid layout against one device; flags that describe the job (and no layout) replace the small job's."""
    import time

    from minidist.equality import layout_sweep as matrix

    for name, value in (("ranks", ranks), ("sample", sample), ("processes", processes)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; it must be at least 1")
    given = given_flags() & set(TrainConfig.model_fields)
    fixed = sorted(given & {*matrix.LAYOUT, "dp", "schedule"})
    if fixed:
        raise UsageError(
            f"--{fixed[0].replace('_', '-')} is one of what --matrix goes through; leave it out, or leave out --matrix"
        )
    job = {name: getattr(config, name) for name in given}
    began = time.perf_counter()
    layouts, refused = matrix.enumerate_layouts(ranks, **job)
    rows = []
    for row in matrix.run_matrix(
        layouts if sample is None else matrix.stratified(layouts, sample), ranks, processes, **job
    ):
        rows.append(row)
        say(matrix.line(row))
    seconds = time.perf_counter() - began
    if json_output:
        print(json.dumps(matrix.as_dict(rows, refused, ranks, seconds)))
    else:
        say(matrix.summary(rows, refused, seconds))
    raise typer.Exit(0 if rows and all(row.equal for row in rows) else 1)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="print the version and leave")] = False) -> None:
    """Distributed training that you can read, run on a laptop, and check."""
    if version:
        print(__version__)
        raise typer.Exit(0)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 600,
    ranks: Annotated[int, typer.Option(help="ranks in every world")] = 4,
    folder: Annotated[Path, typer.Option(help="where traces and the picture go")] = Path("runs/demo"),
    timeout: Timeout = 60.0,
    json_output: Json = False,
) -> None:
    """A byte-level GPT learns English on four ranks: simulated, under mpiexec, and equal to one device."""
    from minidist.commands.demo import run_demo
    from minidist.report.from_file import draw_report

    report = run_demo(steps, ranks, folder, timeout, say)
    report["picture"] = str(draw_report(Path(report["trace"]), "space-time", folder / "space-time.svg"))
    say(f"picture of the last step: {report['picture']}")
    say(
        "next: the commands of README.md; `source .venv/bin/activate` makes minidist, python and mpiexec the ones used"
        " here"
    )
    if json_output:
        print(json.dumps(report))
    raise typer.Exit(0 if report["passed"] else 1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    script: Annotated[Path, typer.Argument(help="a Python program that calls minidist's launch")],
    context: typer.Context,
) -> None:
    """Run SCRIPT; `--ranks N` and the other flags after it are the script's (its `launch` reads them)."""
    if not script.is_file():
        raise UsageError(f"there is no script {str(script)!r}; give the path of a Python file")
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


@app.command()
def memory(
    params: Annotated[str | None, typer.Option(help="number of parameters, such as 7.5e9")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-175b, llama-7b, llama-13b or llama-65b"),
    ] = None,
    dp: Annotated[int, typer.Option(help="data-parallel ranks")] = 1,
    batch: Annotated[int, typer.Option(help="with --model: sequences of one forward pass of a rank")] = 1,
    seq: Annotated[
        int | None, typer.Option(help="with --model: tokens of a sequence (default: the model's most)")
    ] = None,
    accounting: Annotated[str, typer.Option(help="zero, fp32-accumulation or deepspeed")] = "zero",
    recompute: Annotated[str, typer.Option(help="with --model: none, selective, full or sqrt")] = "none",
    prefetch: Annotated[int, typer.Option(help="with --model: units that ZeRO 3 gathers ahead")] = 1,
    form: Annotated[str, typer.Option("--format", help="text or svg (the ZeRO bars)")] = "text",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="with --format svg: a file (default: standard output)")
    ] = None,
    json_output: Json = False,
) -> None:
    """How many bytes a rank holds at each ZeRO stage, for a number of parameters or for the whole step of a model."""
    from minidist.planning.memory_estimator import (
        block_sentence,
        deepspeed_offload,
        model_peak,
        model_states,
        offload_table,
        table,
        whole_number,
    )

    if (params is None) == (model is None):
        raise UsageError("give either --params NUMBER (model states) or --model NAME (the whole peak of a step)")
    if form not in ("text", "svg"):
        raise UsageError(f"--format {form!r}; it must be text or svg")
    if model is not None:
        stages = model_peak(model, dp, batch, seq, accounting, recompute, prefetch)
    else:
        for name, value, default in (
            ("batch", batch, 1),
            ("seq", seq, None),
            ("recompute", recompute, "none"),
            ("prefetch", prefetch, 1),
        ):
            if value != default:
                raise UsageError(
                    f"--{name} {value} is about a model's activations, which --params does not tell; give --model NAME"
                )
        number = whole_number(params or "")
        stages = model_states(number, dp, accounting)
        if accounting == "deepspeed":
            stages["offload"] = deepspeed_offload(number, dp)  # type: ignore[assignment]
    if json_output:
        print(json.dumps(stages))
    elif form == "svg":
        from minidist.report.frame import save
        from minidist.report.zero_bars import zero_bars

        title = f"{model or params} parameters on {dp} rank{'s' * (dp != 1)}, {accounting} accounting"
        figure = zero_bars(stages, title=title, command=command_line())
        if output:
            say(f"written: {save(figure, output)}")
        else:
            with TemporaryDirectory() as folder:
                print(save(figure, Path(folder) / "bars.svg").read_text(encoding="utf-8"))
    else:
        say(f"{model or params} on {dp} rank{'s' * (dp != 1)}, {accounting} accounting")
        say(table(stages))
        if "offload" in stages:
            say(offload_table(stages["offload"]))  # type: ignore[arg-type]
        if "activations_of_a_block" in stages:
            say(block_sentence(stages))
        if "not_counted" in stages:
            say(stages["not_counted"])
        elif accounting == "deepspeed":
            say(
                "DeepSpeed's stage 3 adds 4 bytes for each parameter of the largest layer, which --params cannot tell;"
                " use --model"
            )


@app.command()
@takes_config
def data(
    config: TrainConfig,
    ranks: Ranks = None,
    step: Annotated[int, typer.Option(help="whose samples are listed")] = 0,
    weights: Annotated[str | None, typer.Option(help="speeds of ranks, such as 2,1,1: rows in proportion")] = None,
) -> None:
    """Who trains on what: the size of the data, the rule that deals it out, and the samples of a step on each replica."""
    from minidist.config.train_config import resolve_batches, resolve_dims
    from minidist.data import GlobalBatchSampler, load_dataset, sharding_rule, weighted_shards

    batches = resolve_batches(config, ranks or resolve_dims(config).ranks)
    sampler = GlobalBatchSampler(load_dataset(config.data), batches.global_batch, config.context, config.seed)
    print(sharding_rule(sampler, batches.dp, batches.accumulation, batches.micro_batch, step))
    if weights:
        try:
            numbers = [float(word) for word in weights.split(",")]
        except ValueError:
            raise UsageError(f"--weights {weights!r}; write a number for each rank, as in 2,1,1") from None
        print(f"with weights {weights}, {batches.global_batch} rows:")
        for rank, (first, rows) in enumerate(weighted_shards(batches.global_batch, numbers)):
            print(f"  rank {rank}: " + (f"rows {first} to {first + rows - 1}" if rows else "no row"))


@app.command()
@takes_config
def explain(
    config: TrainConfig,
    file: Annotated[Path, typer.Argument(help="a DeepSpeed configuration file")],
    ranks: Ranks = None,
    params: Annotated[
        str | None, typer.Option(help="also the model states of so many parameters, such as 7.5e9")
    ] = None,
    json_output: Json = False,
) -> None:
    """What a DeepSpeed configuration asks for, in bytes, messages and memory, on a model that flags describe."""
    from minidist.config.deepspeed import honour, read_deepspeed
    from minidist.planning.explain import explain as figures
    from minidist.planning.explain import table

    translation = read_deepspeed(file)
    answer = figures(honour(config, translation, given_flags()), translation, ranks, params)
    print(json.dumps(answer) if json_output else table(answer))


@app.command()
def doctor(json_output: Json = False) -> None:
    """What this machine has: Python, BLAS, MPI and its launcher, GPU; and what is missing for what."""
    from minidist.commands.doctor import examine

    findings = examine()
    if json_output:
        print(json.dumps([finding.__dict__ for finding in findings]))
    else:
        for finding in findings:
            print(f"{'ok ' if finding.ok else '-- '} {finding.name:12} {finding.text}")


@app.command()
def report(
    trace: Annotated[Path, typer.Argument(help="a trace file of train, compare or a program's --trace")],
    picture: Annotated[
        str | None,
        typer.Option(
            help=(
                "space-time (default), gantt, mesh, bytes-matrix, bytes-by-purpose, loss, memory, lanes, perfetto or"
                " page"
            )
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="an .html page of everything, or an .svg, .pdf or .png picture (.json for perfetto)"
        ),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="a:b, only these training steps")] = None,
) -> None:
    """Draw a recorded run: one picture, or with -o NAME.html a page that needs nothing else."""
    from minidist.report.from_file import draw_report

    say(f"written: {draw_report(trace, picture, output, steps)}")


@app.command()
def tiles(
    model: Annotated[str, typer.Option(help="gpt or llama")] = "gpt",
    tp: Annotated[int, typer.Option(help="tensor-parallel ranks")] = 2,
    width: Annotated[int, typer.Option(help="of the model")] = 16,
    heads: Annotated[int, typer.Option(help="attention heads")] = 4,
    kv_heads: Annotated[
        int | None, typer.Option(help="key-value heads of the llama (default: as many as heads)")
    ] = None,
    vocab: Annotated[int, typer.Option(help="words; padded to a multiple of --tp")] = 10,
    experts: Annotated[int, typer.Option(help="experts in the place of the gpt's MLP")] = 0,
    ep: Annotated[int, typer.Option(help="ranks over which the experts are dealt out")] = 1,
    rank: Annotated[int, typer.Option(help="whose tiles the table lists")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="draw all ranks' tiles into an .svg, .pdf or .png file")
    ] = None,
    json_output: Json = False,
) -> None:
    """Which tile of each matrix of a layer is on which rank, under tensor and expert parallelism."""
    from minidist.report.frame import save
    from minidist.report.tiles import model_tiles, tiles_figure, tiles_table

    placed = model_tiles(model, tp, width, heads, kv_heads, vocab, experts, ep)
    if not 0 <= rank < tp * ep:
        raise UsageError(f"--rank {rank}; there are {tp * ep} ranks, 0..{tp * ep - 1}")
    if json_output:
        print(json.dumps({each.name: {"shape": each.shape, "boxes": each.boxes} for each in placed}))
    else:
        say(tiles_table(placed, rank))
    if output:
        title = f"a {model} layer on {tp * ep} ranks" + (
            f": {ep} share {experts} experts, {tp} a layer" if experts else ""
        )
        say(f"written: {save(tiles_figure(placed, title=title, command=command_line()), output)}")


@app.command()
def generate(
    directory: Annotated[Path, typer.Argument(help="the --save directory of a trained gpt or llama, from any layout")],
    prompt: Annotated[str, typer.Option(help="what the text begins with")] = "The ",
    tokens: Annotated[int, typer.Option(help="how many tokens follow")] = 200,
    temperature: Annotated[float, typer.Option(help="below 1: more probable tokens; 0: the most probable one")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="draw from the k most probable tokens only")] = None,
    seed: Annotated[int, typer.Option(help="of the draws")] = 0,
    json_output: Json = False,
) -> None:
    """Text from the latest checkpoint of a trained language model, on one device; the same seed gives the same text."""
    from minidist.commands.generate import run_generation

    result = run_generation(directory, prompt, tokens, temperature, top_k, seed)
    print(json.dumps(result) if json_output else f"{result['prompt']}{result['text']}")


@app.command()
def museum(
    number: Annotated[str | None, typer.Argument(help="an exhibit, such as 1 or 4b; default: a table of all")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="with an exhibit: its loss curves as .svg, .pdf or .png")
    ] = None,
    tests: Annotated[
        bool, typer.Option(help="also run the tests that catch it, where minidist's tests are there")
    ] = True,
    json_output: Json = False,
) -> None:
    """Bugs found in public code, planted in memory: the story, the innocent loss, the difference, the test that catches
    it.
    """
    from minidist.museum import exhibits, find, visit
    from minidist.museum.visiting import table

    if output is not None and number is None:
        raise UsageError("-o draws one exhibit; give its number, as in minidist museum 1 -o one.svg")
    chosen, visits = exhibits() if number is None else find(number), []
    for seen, exhibit in enumerate(chosen):
        if len(chosen) > 5 and seen % 10 == 0:
            say(f"museum: {len(chosen) - seen} exhibits to see{', each with its tests' if tests else ''}")
        visits.append(visit(exhibit, tests))
    if output is not None:
        from minidist.report.frame import save

        say(f"written: {save(visits[0].figure(command_line()), output)}")
    if json_output:
        print(json.dumps([seen.as_dict() for seen in visits]))
    elif number is None:
        print(table(visits))
    else:
        print("\n\n\n".join(seen.text() for seen in visits))


@app.command()
def staleness(
    consistency: Annotated[
        list[str] | None, typer.Argument(help="bsp, delay:T, ssp:S or asp; default bsp, ssp:2 and asp")
    ] = None,
    workers: Annotated[int, typer.Option(help="workers beside the one server")] = 3,
    slow: Annotated[float, typer.Option(help="how many times as long a slow gradient takes")] = 3.0,
    who: Annotated[
        str, typer.Option(help="who is slow: last (worker, always), or anyone (in one of WORKERS gradients)")
    ] = "last",
    seconds: Annotated[float, typer.Option(help="virtual seconds of a run; a gradient takes 0.001")] = 0.3,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a picture: an .svg, .pdf or .png file")] = None,
    json_output: Json = False,
) -> None:
    """A parameter server with slow workers: gradients a second, staleness and loss of each consistency."""
    from minidist.commands.staleness import staleness_runs, table

    runs = staleness_runs(consistency or ("bsp", "ssp:2", "asp"), workers, slow, seconds, who=who)
    if json_output:
        print(json.dumps([run.__dict__ for run in runs]))
    else:
        say(table(runs))
    if output is not None:
        from minidist.report.frame import save
        from minidist.report.staleness import staleness as picture

        title = (
            f"{workers} workers; {'the last one takes' if who == 'last' else 'by chance a gradient takes'} {slow:g}"
            " times as long"
        )
        say(f"written: {save(picture(runs, title=title, command=command_line()), output)}")


@app.command()
def schedule(
    plans: Annotated[
        list[str] | None,
        typer.Argument(
            help="schedules by NAME, FILE.csv or FILE.py:FUNCTION; several are compared; none: what there is"
        ),
    ] = None,
    stages: Annotated[int | None, typer.Option(help="pipeline ranks, each with --chunks stages")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="micro-batches of a step (of a batch, for pipedream-2bw)")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="stages on a rank, for the schedules that leave the choice")
    ] = None,
    times: Annotated[
        str, typer.Option(help="times of a stage: F=1,I=1,W=1,comm=0; FB of an overlapped pair")
    ] = "F=1,I=1,W=1,comm=0",
    profile: Annotated[
        str | None, typer.Option(help="a JSON file with each stage's times and bytes, instead of --times")
    ] = None,
    memory_limit: Annotated[
        float | None, typer.Option(help="exit 1 when a rank needs more bytes (micro-batches, without a profile)")
    ] = None,
    receives: Annotated[
        str, typer.Option(help="latency, or blocking: receives stop the rank, as in some runtimes")
    ] = "latency",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="run every stage's forward again before its backward")
    ] = False,
    lowered: Annotated[bool, typer.Option("--lowered", help="show sends, posted receives and reductions too")] = False,
    option: Annotated[
        list[str] | None, typer.Option(help="a schedule's own option, such as backward_order=forward or stashing=0")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format", help="text, csv, json, svg, versions (svg: the weights that each action sees) or perfetto"
        ),
    ] = "text",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a file instead of standard output")] = None,
    json_output: Json = False,
) -> None:
    """A pipeline schedule: its order, its picture, and what it costs in time and memory."""
    from minidist.pipeline import passes
    from minidist.pipeline.plan import load_plan, schedules
    from minidist.pipeline.plan.load import is_name
    from minidist.report.schedules import FORMATS, LARGE, judge, limit_sentence, write

    if memory_limit is not None and not memory_limit >= 0:
        raise UsageError(f"--memory-limit is {memory_limit}; it must be a number of at least 0")

    form = "json" if json_output else form
    if form not in FORMATS:
        raise UsageError(f"--format {form!r}{nearest(form, FORMATS)}; it must be one of {', '.join(FORMATS)}")
    if not plans:
        for name, entry in schedules().items():
            print(f"{name:24} {entry.about()}")
        return
    judged = []
    for name in plans:
        plan = load_plan(name, stages, microbatches, chunks, **options_of(option or []))
        plan = passes.recompute(plan) if recompute else plan
        plan = passes.lower(plan) if lowered and not plan.is_lowered else plan
        judged.append(
            judge(
                plan,
                times,
                profile,
                receives,
                spans=form in ("svg", "versions", "perfetto") or (form == "text" and plan.actions <= LARGE),
                named=is_name(name),
            )
        )
    pieces = write(judged, form, command_line(), shutil.get_terminal_size().columns)
    if output is None:
        for piece in pieces:
            sys.stdout.write(piece)
    else:
        with output.open("w", encoding="utf-8") as file:
            file.writelines(pieces)
        say(f"written: {output}")
    too_much = limit_sentence(judged, memory_limit)
    if too_much:
        say(f"minidist: {too_much}")
        raise typer.Exit(1)


def options_of(texts: list[str]) -> dict[str, Any]:
    """name=value texts; a number, true or false where it reads like one."""
    result: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {text!r}; write name=value")
        words: dict[str, Any] = {"true": True, "false": False}
        result[name.replace("-", "_")] = words.get(value.lower(), int(value) if value.isdecimal() else value)
    return {
        name: bool(value) if name == "stashing" and isinstance(value, int) else value for name, value in result.items()
    }


@app.command()
def partition(
    profile: Annotated[
        str, typer.Argument(help="a JSON list of layers (op, fwd_ms, bwd_ms, act_bytes, param_bytes), or FILE:NAME")
    ],
    machines: Annotated[int, typer.Option(help="machines to use; stages, for the methods that replicate none")],
    bandwidth: Annotated[float | None, typer.Option(help="pipedream: bytes per second of a link")] = None,
    method: Annotated[
        str,
        typer.Option(help="pipedream, gpipe (times differ least), time (fastest slowest stage), parameters or uniform"),
    ] = "pipedream",
    objective: Annotated[
        str, typer.Option(help="pipedream: released (compute + synchronisation) or paper (the larger of the two)")
    ] = "released",
    memory_limit: Annotated[float | None, typer.Option(help="pipedream: bytes of a machine")] = None,
    json_output: Json = False,
) -> None:
    """Which layers make a stage; by PipeDream's optimizer also how many machines share it."""
    from minidist.pipeline.partition import METHODS, pipedream, read_profile
    from minidist.pipeline.partition import partition as cut

    layers = read_profile(profile)
    if method == "pipedream":
        if bandwidth is None:
            raise UsageError(
                "--method pipedream needs --bandwidth, the bytes per second of a link; or take --method time"
            )
        result = pipedream(layers, machines, bandwidth, objective, memory_limit)
    elif bandwidth is not None or memory_limit is not None:
        raise UsageError(
            f"--method {method} looks at no link and no memory; leave --bandwidth and --memory-limit out, or take"
            f" --method {METHODS[0]}"
        )
    else:
        result = cut(layers, method, machines)
    if json_output:
        print(json.dumps(result.as_dict()))
        return
    print(f"slowest stage {result.slowest_stage_seconds:.6g} s")
    for number, stage in enumerate(result.stages):
        print(
            f"stage {number}: layers {stage.first} to {stage.last} on {stage.replicas}"
            f" machine{'s' if stage.replicas > 1 else ''}"
        )


@app.command()
@takes_config
def profile(
    config: TrainConfig,
    rounds: Annotated[int, typer.Option(min=1, help="timed passes of each block")] = 5,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a file instead of standard output")] = None,
) -> None:
    """Time each block of the model on this machine: a PROFILE.json for minidist partition and train --partition."""
    from minidist.planning.profiler import profile_layers
    from minidist.train.job import check

    check(config)
    text = json.dumps([vars(layer) for layer in profile_layers(config, rounds)], indent=1)
    if output is None:
        print(text)
    else:
        writable(output, "--output")
        output.write_text(text + "\n", encoding="utf-8")
        say(f"written: {output}")


@bench_app.command("collectives")
def bench_collectives(
    ranks: Annotated[
        int | None, typer.Option(help="processes (default 2); virtual ranks with --simulated (default 16)")
    ] = None,
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 8,
    sizes: Annotated[str | None, typer.Option(help="bytes of the arrays, such as 4096,1048576")] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="on the virtual clock: every algorithm, and what auto takes")
    ] = False,
    operation: Annotated[str, typer.Option(help="with --simulated: the collective")] = "all_reduce",
    alpha: Annotated[float, typer.Option(help="with --simulated: seconds of latency a message")] = 1e-6,
    beta: Annotated[float, typer.Option(help="with --simulated: seconds a byte")] = 1e-10,
    picture: Annotated[
        Path | None, typer.Option(help="draw time over bytes, with the crossovers, into this .svg, .pdf or .png")
    ] = None,
    json_output: Json = False,
) -> None:
    """Every all-reduce against MPI_Allreduce (and gloo, where torch is installed), or every algorithm on the virtual
    clock.
    """
    from minidist.bench import collectives as real
    from minidist.bench import virtual_collectives as virtual
    from minidist.comm import LinkModel

    lengths = tuple(whole_numbers(sizes, "--sizes")) if sizes else None
    if simulated:
        module: Any = virtual
        result = virtual.bench_virtual_collectives(
            operation, 16 if ranks is None else ranks, LinkModel(alpha, beta), lengths or virtual.SIZES
        )
    else:
        module = real
        result = real.bench_collectives(2 if ranks is None else ranks, rounds, lengths or real.SIZES)
    if picture:
        from minidist.report.crossover import crossover
        from minidist.report.frame import save

        title = f"{operation} on {ranks or (16 if simulated else 2)} {'virtual ranks' if simulated else 'processes'}"
        rows = [row for row in result["rows"] if "side" in row]
        say(f"written: {save(crossover(rows, title=title, command=command_line()), picture)}")
    if json_output:
        print(json.dumps(result))
        return
    if not simulated:
        show_bench({**result, "rows": [row for row in result["rows"] if "side" not in row]}, False)
    print(module.table(result))


@bench_app.command("network")
def bench_network(
    hosts: Annotated[int, typer.Option(help="hosts, each a network namespace with one rank")] = 3,
    rate: Annotated[float, typer.Option(help="what each host's interface lets out, in Mbit/s")] = 200.0,
    sizes: Annotated[str | None, typer.Option(help="bytes of the arrays, such as 1048576,4194304")] = None,
    algorithms: Annotated[
        str, typer.Option(help="all-reduce algorithms, with commas between them")
    ] = "ring,rabenseifner,recursive_doubling",
    rounds: Annotated[int, typer.Option(help="calls of each")] = 3,
    json_output: Json = False,
) -> None:
    """All-reduce between hosts with slow links (network namespaces; needs root): measured time beside the virtual
    clock's.
    """
    from minidist.bench import network as module

    result = module.bench_network(
        hosts, 1e6 * rate, whole_numbers(sizes, "--sizes") if sizes else module.SIZES, algorithms.split(","), rounds
    )
    if json_output:
        print(json.dumps(result))
        return
    show_bench({**result, "rows": []}, False)
    print(module.table(result))


@bench_app.command("step")
def bench_step(
    cases: Annotated[list[str] | None, typer.Argument(help="gpt, gpt-512, gpt-tiny, mlp; default all")] = None,
    ranks: Annotated[int, typer.Option(help="more than 1: a data-parallel step under mpiexec (one GPT case)")] = 1,
    tp: Annotated[int, typer.Option(help="more than 1: a tensor-parallel step of GPT blocks under mpiexec")] = 1,
    against: Annotated[
        str | None, typer.Option(help="with --ranks or --tp: torch, or none for our sides alone")
    ] = "torch",
    zero: Annotated[
        str | None, typer.Option(help="with --ranks: ZeRO stages, such as 1,2,3, beside data parallelism")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds")] = 8,
    json_output: Json = False,
) -> None:
    """A training step against PyTorch's best eager step on the same model, batch and optimizer."""
    from minidist.bench.parallel import bench_data_parallel
    from minidist.bench.step import bench_step as bench

    if zero is not None and not all(part.strip().isdigit() for part in zero.split(",")):
        raise UsageError(f"--zero {zero!r}; write the stages with commas, such as 1,2,3")
    stages = [int(part) for part in zero.split(",")] if zero else []
    other = None if against == "none" else against
    if tp > 1:
        from minidist.bench.tensor_parallel import bench_tensor_parallel

        if cases or stages or ranks > 1:
            raise UsageError(
                "bench step --tp has a stack of GPT blocks of its own: give no case, --ranks or --zero with it"
            )
        show_bench(bench_tensor_parallel(tp, rounds, other), json_output)
        return
    if ranks > 1:
        show_bench(bench_data_parallel(ranks, rounds, cases[0] if cases else "gpt", stages, other), json_output)
        return
    if stages:
        raise UsageError("bench step --zero needs --ranks 2 or more: one rank has nothing to shard")
    show_bench(bench(cases or None, rounds=rounds), json_output)


@bench_app.command("pipeline")
def bench_pipeline(
    case: Annotated[str, typer.Argument(help="gpt, gpt-512 or gpt-tiny")] = "gpt",
    stages: Annotated[int, typer.Option(help="processes, a stage each")] = 2,
    schedule: Annotated[str, typer.Option(help="1f1b or gpipe (others without a ratio to PyTorch)")] = "1f1b",
    microbatches: Annotated[int, typer.Option(help="micro-batches of the batch of 8")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds")] = 8,
    json_output: Json = False,
) -> None:
    """A pipeline step under mpiexec against torch.distributed.pipelining on gloo, and against the same batch on one
    rank.
    """
    from minidist.bench.pipeline import bench_pipeline as bench

    show_bench(bench(stages, schedule, microbatches, rounds, case), json_output)


@bench_app.command("memory")
def bench_memory(
    cases: Annotated[list[str] | None, typer.Argument(help="gpt, gpt-512, gpt-tiny, mlp; default all")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="interleaved rounds")] = 12,
    json_output: Json = False,
) -> None:
    """What the account of memory costs a training step, when it is on and when it keeps a timeline."""
    from minidist.bench.memory import bench_memory as bench

    show_bench(bench(cases or None, rounds=rounds), json_output)


@bench_app.command("hybrid")
def bench_hybrid(
    dp: Annotated[int, typer.Option(help="data-parallel ranks")] = 2,
    tp: Annotated[int, typer.Option(help="tensor-parallel ranks")] = 2,
    pp: Annotated[int, typer.Option(help="pipeline ranks")] = 2,
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 8,
    json_output: Json = False,
) -> None:
    """The share of a hybrid step that is neither arithmetic nor messages, under mpiexec."""
    from minidist.bench.hybrid import bench_hybrid as bench

    show_bench(bench(rounds, dp, tp, pp), json_output)


def show_bench(result: dict[str, Any] | None, json_output: bool) -> None:
    """The environment, then a row a measurement."""
    if result is None:
        return  # not the rank that prints
    if json_output:
        print(json.dumps(result))
        return
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    for row in result["rows"]:
        ratio = "    -" if row.get("ratio") is None else f"{row['ratio']:5.2f}"
        extra = "".join(
            f"  {key} {value:.4g}"
            for key, value in row.items()
            if key not in ("name", "ratio", "median_s", "rounds") and isinstance(value, int | float)
        )
        print(f"{row['name']:56} ratio {ratio}  median {row['median_s']:.6f} s  rounds {row['rounds']}{extra}")


def whole_numbers(text: str, name: str) -> list[int]:
    """The numbers of a comma-separated list."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{name} {text!r}; it must be whole numbers with commas between them, such as 4096,1048576"
        ) from None


def command_line() -> str:
    """This command, as a person would type it."""
    return "minidist " + shlex.join(sys.argv[1:])


def given_flags() -> set[str]:
    """The fields whose flags stand on the command line."""
    return {word.split("=")[0][2:].replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}


def main(arguments: Sequence[str] | None = None) -> None:
    """The program `minidist`."""
    if arguments is not None:
        sys.argv[1:] = list(arguments)
    tune()  # before anything computes: bits depend on the number of BLAS threads
    try:
        app(prog_name="minidist")
    except MemoryError as error:
        say(f"minidist: out of memory: {error}; make the model, the batch or the number of ranks smaller")
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        say(
            f"minidist: cannot open {str(error.filename)!r} ({error.strerror}); give the path of a file, in a folder"
            " that exists"
        )
        sys.exit(2)
    except MinidistError as error:
        for line in (f"minidist: {error}", *getattr(error, "__notes__", ())):
            say(line)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
