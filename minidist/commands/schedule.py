"""`minidist schedule`: the order, the picture and the cost of a pipeline schedule.

Proved by: tests/commands/test_schedule.py
"""

import inspect
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.file_format import format_of
from minidist.base.files import writing
from minidist.base.limits import whole_number
from minidist.comm.launching import writable
from minidist.commands.command import Argument, Exit, Json, Option, command_line, json_or_table, say
from minidist.commands.flags import above_zero, one_of

if TYPE_CHECKING:
    from minidist.core.pipeline.plan import Plan

WITHOUT_TERMINAL = 2_000  # characters of a line in a file or a pipe


@dataclass(frozen=True)
class PlanFlags:
    """The flags of what a plan is, and how it is timed."""

    stages: Annotated[int | None, Option("--stages", "--ranks", help="pipeline ranks, each with --chunks stages")] = (
        None
    )
    microbatches: Annotated[int | None, Option(help="micro-batches of a step (of a batch, for pipedream-2bw)")] = None
    chunks: Annotated[int | None, Option(help="stages on a rank, for the schedules that leave the choice")] = None
    times: Annotated[
        str,
        Option(
            help="times of a stage: F=1,I=1,W=1,comm=0; FB of an overlapped pair; of schedules with different numbers"
            " of stages per rank, those of a rank's whole part of the model"
        ),
    ] = "F=1,I=1,W=1,comm=0"
    profile: Annotated[str | None, Option(help="a JSON file with each stage's times and bytes, instead of --times")] = (
        None
    )
    memory_limit: Annotated[
        float | None,
        Option(help="exit 1 when a rank needs more bytes (micro-batches, without a profile)", callback=above_zero),
    ] = None
    receives: Annotated[
        str, Option(help="latency, blocking: receives stop the rank where they stand, as in some runtimes, or both")
    ] = "latency"
    recompute: Annotated[bool, Option("--recompute", help="run every stage's forward again before its backward")] = (
        False
    )
    lowered: Annotated[bool, Option("--lowered", help="show sends, posted receives and reductions too")] = False
    option: Annotated[
        list[str] | None, Option(help="a schedule's own option, such as backward_order=forward or stashing=0")
    ] = None


@json_or_table
def schedule(
    *,
    plans: Annotated[
        list[str] | None,
        Argument(help="schedules by NAME, FILE.csv or FILE.py:FUNCTION; several are compared; none: what there is"),
    ] = None,
    flags: PlanFlags,
    form: Annotated[
        str | None,
        Option(
            "--format",
            help="text (default), csv, json, svg, versions (svg: the weights that each action sees), perfetto (json) or"
            " steps (html)",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", help="a file instead of standard output: .txt, .csv, .json, .html, .svg, .pdf or .png"
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Validate, time and draw pipeline schedules: their order, their picture, and their cost in time and memory."""
    from minidist.pipeline.schedules import schedules
    from minidist.report.schedules import ENDINGS, FORMATS, limit_sentence

    one_of(flags.receives, "--receives", ("latency", "blocking", "both"))
    form, flag = ("json", "--json") if json_output else (form, "--format")
    if form is not None and form not in FORMATS:
        raise UsageError(f"--format {quoted(form)}{nearest(form, FORMATS)}; it must be one of {', '.join(FORMATS)}")
    form = format_of(output, form, ENDINGS, "text", ("--output", flag))
    if output is not None:
        if not plans:
            raise UsageError(f"--output {quoted_path(output)} without a schedule; name one, such as 1f1b")
        refuse_others(output, form)
    if not plans:
        for name, entry in schedules().items():
            print(f"{name:24} {_about(entry.function)}")
        return

    evaluated = timed(plans, flags, form)
    write_result(evaluated, form, output)

    # The result is written before the exit code 1, so that a script has both.
    too_much = limit_sentence(evaluated, flags.memory_limit)
    if too_much:
        say(f"minidist: {too_much}")
        raise Exit(1)


def _about(function: Callable[..., Any]) -> str:
    """Return a line on a schedule: what its file says, or its function where the file has several families."""
    said_by = function if function.__module__ == "minidist.core.pipeline.schedules" else inspect.getmodule(function)
    about = inspect.getdoc(said_by) or ""
    if said_by is not function:
        return about.partition("\n")[0]
    about = " ".join(about.partition("\n\n")[0].split()).removeprefix("Return ")
    return about[:1].upper() + about[1:]


def timed(plans: Iterable[str], flags: PlanFlags, form: str) -> list[Any]:
    """Return every plan, validated and timed as the flags say. form: what is written of them."""
    from minidist.pipeline.schedules import load_plan
    from minidist.pipeline.schedules.load import is_name
    from minidist.report.schedules import evaluate, is_large, stage_shares

    # Every plan is validated before the first one is timed.
    loaded, evaluated = [], []
    options = options_of(flags.option or [])
    for name in plans:
        plan = load_plan(name, flags.stages, flags.microbatches, flags.chunks, **options)
        loaded.append(passed(plan, flags.recompute, flags.lowered, is_valid=is_name(name)))
    spans = form in ("svg", "versions", "perfetto", "steps")
    for name, plan, share in zip(plans, loaded, stage_shares(loaded), strict=True):
        shown = spans or (form == "text" and not is_large(plan))
        for one, how in in_both_ways(plan) if flags.receives == "both" else [(plan, flags.receives)]:
            found = evaluate(one, flags.times, flags.profile, how, spans=shown, named=is_name(name), stage_share=share)
            evaluated.append(found)
    return evaluated


def in_both_ways(plan: "Plan") -> "list[tuple[Plan, str]]":
    """Return the plan twice, named after what its receives do, each with the way in which they are timed."""
    ways = {"latency": "posted ahead", "blocking": "blocking receives"}
    return [(replace(plan, name=f"{plan.name}, {words}"), way) for way, words in ways.items()]


def passed(plan: "Plan", recompute: bool, lowered: bool, is_valid: bool) -> "Plan":
    """Return a plan with the forwards of recomputation, and lowered, as the flags say."""
    from minidist.core.pipeline.plan import lower
    from minidist.pipeline.passes import recompute as recomputed
    from minidist.pipeline.validate import validate

    # Recomputation adds forwards, so it comes before lowering, which adds the messages.
    # Both assume a valid plan, and lowering one that is not may never end.
    if (recompute or lowered) and not is_valid:
        validate(plan, allow_wrong_gradients=True)
    plan = recomputed(plan) if recompute else plan
    return lower(plan) if lowered and not plan.is_lowered else plan


def refuse_others(output: Path, form: str) -> None:
    """Raise UsageError when a file is there already that minidist has not written there."""
    from minidist.report.frame import METADATA
    from minidist.report.schedules import MARKS

    begins, mark = ("", METADATA[output.suffix][1]) if output.suffix in METADATA else MARKS[form]
    if output.is_file():
        writable(output, "--output", begins, mark)


def write_result(evaluated: list[Any], form: str, output: Path | None) -> None:
    """Write the plans to standard output or a file."""
    from minidist.report.frame import SUFFIXES, save
    from minidist.report.schedules import picture, write

    if output is not None and output.suffix in SUFFIXES:
        say(f"written: {save(picture(evaluated, form, command_line()), output)}")
        return
    width = shutil.get_terminal_size((WITHOUT_TERMINAL, 0)).columns if output is None else WITHOUT_TERMINAL
    pieces: Iterable[str] = write(evaluated, form, command_line(), width)
    if output is not None and form == "csv":
        pieces = ["".join(pieces)]
        check_csv(output, pieces[0])
    if output is None:
        for piece in pieces:
            sys.stdout.write(piece)
    else:
        with (
            writing("the schedule", output, "make room there, or choose another --output"),
            output.open("w", encoding="utf-8") as file,
        ):
            file.writelines(pieces)
        say(f"written: {output}")


def check_csv(path: Path, text: str) -> None:
    """Raise UsageError when another text is there already: cells say nothing of who has written them."""
    with writing("the schedule", path, "choose another --output"):
        if path.is_file() and path.read_bytes() not in (b"", text.encode()):
            raise UsageError(
                f"--output {quoted_path(path)} exists already with other rows, and a CSV file does not say whether they"
                " are your own; choose another --output, or remove that file"
            )


def options_of(texts: list[str]) -> dict[str, Any]:
    """Return the options of texts like name=value; a value is a number, true, false, or a word."""
    words: dict[str, Any] = {"true": True, "false": False}
    result: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {quoted(text)}; write name=value")
        if name in ("source", "stages", "microbatches", "chunks"):
            raise UsageError(f"--option {quoted(text)}; it is not an option of a schedule, write --{name}")
        # true and false, whole numbers, and words: a schedule checks what it gets.
        result[name.replace("-", "_")] = words.get(value.lower(), value if whole_number(value) is None else int(value))
    if isinstance(result.get("stashing"), int):
        result["stashing"] = bool(result["stashing"])  # --option stashing=0
    return result
