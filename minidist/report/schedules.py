"""What `minidist schedule` prints: a plan validated, timed, and written as text, CSV, JSON, SVG or for Perfetto.

Proved by: tests/commands/test_schedule.py
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from minidist.base.errors import UsageError, quoted
from minidist.core.pipeline.plan import Plan
from minidist.pipeline.passes import lower_blocking
from minidist.pipeline.plan_methods import show
from minidist.pipeline.times import parse_times, read_profile
from minidist.pipeline.timing import Timing, over_limit, time_plan
from minidist.pipeline.validate import validate
from minidist.report.frame import GENERATOR, HTML, METADATA, SUFFIXES, Figure, svg_text
from minidist.report.gantt import as_traces, gantt, numbers, text_gantt, title_of
from minidist.report.perfetto import perfetto
from minidist.report.version_gantt import version_gantt

# The formats, and how a file in each begins, or what it holds near its beginning: such a file may be overwritten.
MARKS = {
    "text": ("", " micro-batch"),
    "csv": ("", ""),
    "json": ("{", '"orders": [["'),
    "svg": ("<?xml", METADATA[".svg"][1]),
    "versions": ("<?xml", METADATA[".svg"][1]),
    "perfetto": ('{"traceEvents": [', ""),
    "steps": ("<!doctype html>", GENERATOR),
}
FORMATS = tuple(MARKS)
ENDINGS = {
    "text": (".txt",),
    "csv": (".csv",),
    "json": (".json",),
    "svg": SUFFIXES,
    "versions": SUFFIXES,
    "perfetto": (".json",),
    "steps": HTML,
}
LARGE = 300_000  # actions; a named synchronous schedule of more is timed without validating it again


@dataclass
class EvaluatedPlan:
    """A plan with its times and weight versions."""

    plan: Plan
    timing: Timing
    weight_versions: list[int]


def stage_shares(plans: Sequence[Plan]) -> list[float]:
    """Return the part of its rank's model that a stage of each plan is, so that all plans compute the same model.

    1 for plans with equally many stages on a rank: their stages are equal as they are.
    """
    shares = [plan.ranks / plan.stages for plan in plans]
    return shares if len(set(shares)) > 1 else [1.0] * len(plans)


def is_large(plan: Plan) -> bool:
    """Whether a plan has too many actions for drawing or checking each one again; a pair that overlaps is two."""
    items = sum(map(len, plan.orders))
    return items > LARGE or items + sum(isinstance(item, tuple) for order in plan.orders for item in order) > LARGE


def evaluate(
    plan: Plan,
    times: str,
    profile: str | None,
    receives: str,
    spans: bool,
    named: bool = False,
    stage_share: float = 1.0,
) -> EvaluatedPlan:
    """Validate and time a plan.

    times: the text of --times. profile: a file that replaces it. named: the plan is a registered schedule's, not a
    user's own. stage_share: see `stage_shares`; a profile has the times of the stages themselves.
    """
    # A registered schedule that flushes is valid at any size and keeps one version, so a large one is not validated
    # again.
    if named and is_large(plan) and plan.updates == "flush" and not plan.is_lowered:
        versions = [1] * plan.ranks
    else:
        versions = validate(plan, allow_wrong_gradients=True).weight_versions

    # Receives that block are messages of the plan, so they are put in before it is timed.
    costs = read_profile(profile, plan.stages) if profile else parse_times(times, plan.stages).of_parts(stage_share)
    timed = lower_blocking(plan) if receives == "blocking" and not plan.is_lowered else plan
    timing = time_plan(timed, costs, spans=spans, receives=receives)
    return EvaluatedPlan(plan, replace(timing, stage_share=1.0 if profile else stage_share), versions)


def write(evaluated: Sequence[EvaluatedPlan], form: str, command: str, width: int) -> Iterator[str]:
    """Yield the pieces of the output in the format `form`."""
    if form not in FORMATS:
        raise UsageError(f"--format {quoted(form)}; it must be one of {', '.join(FORMATS)}")

    # Piece by piece, because a plan may have millions of actions.
    if form == "json":
        yield from _json(evaluated[0]) if len(evaluated) == 1 else _list_json(evaluated)
        yield "\n"
    elif form == "csv":
        for number, one in enumerate(evaluated):
            yield "\n" if number else ""
            yield one.plan.to_csv()
    elif form in ("svg", "versions"):
        yield svg_text(picture(evaluated, form, command))
    elif form in ("perfetto", "steps"):
        if len(evaluated) > 1:
            raise UsageError(f"--format {form} takes one schedule; call it once for each")
        yield _as_run(evaluated[0].timing, form)
    else:
        # Text: one axis of time for all, and a table to compare them.
        longest = max(one.timing.makespan for one in evaluated)
        for number, one in enumerate(evaluated):
            yield "\n" if number else ""
            yield text_gantt(one.timing, width, one.weight_versions, longest)
            if one.timing.longest_stop:
                yield f"the longest stop: {one.timing.longest_stop}\n"
        if len(evaluated) > 1:
            yield "\n" + _table(evaluated)


def _as_run(timing: Timing, form: str) -> str:
    """Return the text of a format that shows a recorded run: for Perfetto, or the page to step through."""
    from minidist.report.stepper import show

    traces = as_traces(timing)
    return json.dumps(perfetto(traces)) + "\n" if form == "perfetto" else show(traces, title_of(timing)).page


def picture(evaluated: Sequence[EvaluatedPlan], form: str, command: str) -> Figure:
    """Return the picture of the format "svg" or "versions"."""
    return (gantt if form == "svg" else version_gantt)([one.timing for one in evaluated], command)


def _list_json(evaluated: Sequence[EvaluatedPlan]) -> Iterator[str]:
    """Yield the JSON of several plans."""
    for number, one in enumerate(evaluated):
        yield ", " if number else '{"schedules": ['
        yield from _json(one)
    yield "]}"


def _json(one: EvaluatedPlan) -> Iterator[str]:
    """Yield the JSON of one plan, its orders rank by rank: there may be millions of actions."""
    plan, timing = one.plan, one.timing
    yield '{"orders": ['
    for rank, order in enumerate(plan.orders):
        yield (", " if rank else "") + ('["' + '", "'.join(map(show, order)) + '"]' if order else "[]")
    rest = {
        "makespan": timing.makespan,
        "cost": timing.cost,
        "idle": timing.idle,
        "bubble_of_ideal": timing.bubble_of_ideal,
        "bubble_of_total": timing.bubble_of_total,
        "peak": timing.peak if timing.stage_share == 1 else timing.activations,
        "weight_versions": one.weight_versions,
        "name": plan.name,
        "lower_bound": timing.lower_bound,
        **({"peak_bytes": timing.peak_bytes} if timing.peak_bytes else {}),
        **({"longest_stop": timing.longest_stop} if timing.longest_stop else {}),
    }
    yield "], " + json.dumps(rest)[1:]


def _table(evaluated: Sequence[EvaluatedPlan]) -> str:
    lines = [f"{'schedule':26} {'makespan':>9} {'cost':>9} {'worst idle':>10} {'of total':>9}  peak"]
    for one in evaluated:
        t = one.timing
        lines.append(
            f"{one.plan.name:26} {t.makespan:9g} {t.cost:9g} {max(t.idle):10g} {100 * t.bubble_of_total:7.1f} % "
            f" {numbers(t.activations)}"
        )

    # Chunks are compared by the work of a rank, because a stage is a smaller part where a rank has several.
    divided = [f"{one.plan.name} {1 / one.timing.stage_share:g}" for one in evaluated if one.timing.stage_share != 1]
    if divided:
        lines.append("times and activations of a stage are divided by the stages of a rank: " + ", ".join(divided))
    return "\n".join(lines) + "\n"


def limit_sentence(evaluated: Sequence[EvaluatedPlan], limit: float | None) -> str | None:
    """Return the sentence about what exceeds the memory limit, or None."""
    for one in evaluated:
        sentence = over_limit(one.timing, limit) if limit is not None else None
        if sentence:
            return f"{title_of(one.timing).split(':')[0]}: {sentence}"
    return None
