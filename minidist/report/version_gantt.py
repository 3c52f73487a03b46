"""The weights that each action of an asynchronous pipeline sees: one row per rank, the colour of a bar its version.

    rank 0   F0 v0 | F1 v0 | F2 v0 |    | B0 v0 ↑1 | F3 v1 | B1 v0 ↑2 | ...     F and B of a micro-batch
    rank 2   ....... | F0 v0 | B0 v0 ↑1 | F1 v1 | B1 v1 ↑2 | ...                 have one colour, with stashing

Under the rows one strip per rank counts the versions that are kept: what a pipeline without bubble costs.

Proved by: tests/commands/test_schedule.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.core.pipeline.plan import Action, Plan
from minidist.pipeline.timing import Timing
from minidist.report.frame import Figure, Style, finish, line, patch
from minidist.report.gantt import draw_strips, panels_of
from minidist.report.palette import MEMORY, PALETTE, ink

SHADES = ("#4477AA", "#CCBB44", "#EE6677", "#228833", "#AA3377", "#66CCEE")  # of versions, in turn


def versions_seen(plan: Plan) -> list[list[tuple[Action, int]]]:
    """Return for each rank its actions with the version of the weights that each sees, by the update rules."""
    if plan.updates in ("flush", "none"):
        raise UsageError(
            f"plan {quoted(plan.name)} has one version of the weights; draw an asynchronous one, such as pipedream"
        )
    result = []
    for rank in range(plan.ranks):
        # updates: how many this rank has made. used[i]: the version that the forward of micro-batch i saw.
        updates, used, row = 0, dict[int, int](), list[tuple[Action, int]]()
        for action in plan.actions(rank):
            i = action.microbatch
            if action.kind == "F":
                # Vertical sync: the version that stage 0 used for this micro-batch. 2BW: one version behind that of its
                # batch. Else the newest.
                rule = {"vertical-sync": max(0, i - (plan.stages - 1)), "2bw": max(i // plan.batch - 1, 0)}
                used[i] = rule.get(plan.updates, updates)
            # With stashing the backward sees what its forward saw; without, the newest version.
            newest = plan.updates == "no-stash" and action.kind in ("B", "I")
            row.append((action, updates if newest else used[i]))
            if action.kind in ("B", "W") and (i + 1) % plan.batch == 0:
                updates += 1
        result.append(row)
    return result


def version_gantt(timings: Sequence[Timing], command: str = "", titles: Sequence[str] = ()) -> Figure:
    """Draw one panel per timing (made with spans=True). titles: one per panel, in place of its schedule and sizes."""
    longest = max(timing.makespan for timing in timings)
    figure, panels = panels_of(timings, 0.36)
    for number, timing in enumerate(timings):
        if timing.spans is None:
            raise UsageError("the picture of versions needs the spans of a plan; call time_plan(plan, spans=True)")
        _lanes(timing, panels[2 * number], longest, titles[number] if titles else _title(timing.plan))
        _kept(timing, panels[2 * number + 1])

    handles = [
        patch(shade, f"version {k}{', ' + str(k + len(SHADES)) + ', ...' if k < 1 else ''}")
        for k, shade in enumerate(SHADES)
    ]
    marks = [line(PALETTE["blocked"], "an update", linestyle="-"), patch(MEMORY["stash"], "versions kept")]
    return finish(figure, [*handles, *marks], command)


def _title(plan: Plan) -> str:
    what = "mini-batches" if plan.batch == 1 else "micro-batches"  # a mini-batch is not cut
    return (
        f"{plan.name}, updates: {plan.updates}, {plan.ranks} ranks, {plan.microbatches} {what}: the version that each"
        " sees"
    )


def _lanes(timing: Timing, axes: Any, longest: float, title: str) -> None:
    plan = timing.plan
    for rank, (row, seen) in enumerate(zip(timing.spans or [], versions_seen(plan), strict=True)):
        for (_, start, end), (action, version) in zip(row, seen, strict=True):
            # One bar per action in the colour of its version; forwards are lower, so that they can be told from
            # backwards.
            forward = action.kind == "F"
            colour = SHADES[version % len(SHADES)]
            style: Style = {"color": colour, "edgecolor": "white", "linewidth": 0.5}
            height, gid = 0.6 if forward else 0.86, f"{action} v{version}"
            axes.barh(rank, end - start, left=start, height=height, gid=gid, **style)
            text = f"{action.kind}{action.microbatch}\nv{version}"
            if (end - start) / longest > 0.012:
                words: Style = {"ha": "center", "va": "center", "fontsize": 5.5, "color": ink(colour)}
                axes.text((start + end) / 2, rank, text, linespacing=0.9, **words)
            # The update after a batch's last backward, as a red line.
            if action.kind in ("B", "W") and (action.microbatch + 1) % plan.batch == 0:
                axes.plot([end, end], [rank - 0.48, rank + 0.48], color=PALETTE["blocked"], linewidth=1.2)
    axes.set_xlim(0, longest or 1)
    axes.set_title(title, fontsize=9, loc="left")


def kept(timing: Timing, rank: int) -> tuple[list[float], list[int]]:
    """Return times, and how many versions a rank keeps from each time on: in use, still to be used, and the latest."""
    # using[i]: the version of a micro-batch between its forward and its backward.
    plan, seen = timing.plan, versions_seen(timing.plan)[rank]
    assert timing.spans is not None
    times, counts, updates, using = [0.0], [1], 0, dict[int, int]()
    for number, ((_, start, end), (action, version)) in enumerate(zip(timing.spans[rank], seen, strict=True)):
        if action.kind == "F":
            using[action.microbatch] = version
        elif action.kind in ("B", "W"):
            using.pop(action.microbatch)
            updates += (action.microbatch + 1) % plan.batch == 0
        # An old version must also be kept while a forward to come will use it.
        coming = [v for a, v in seen[number + 1 :] if a.kind == "F" and v < updates]
        older = {*using.values(), *coming} if plan.updates != "no-stash" else set()
        times.append(start if action.kind == "F" else end)
        counts.append(
            len({*range(min([*older, updates]), updates + 1)} if plan.updates == "vertical-sync" else {*older, updates})
        )
    return times, counts


def _kept(timing: Timing, axes: Any) -> None:
    # One strip per rank, all on one scale, with its peak at the end.
    found = [kept(timing, rank) for rank in range(timing.plan.ranks)]
    peaks = [max(counts) for _, counts in found]
    strips = [
        (times, [count / max(peaks) for count in counts], f"{peak}")
        for (times, counts), peak in zip(found, peaks, strict=True)
    ]
    title = f"versions of the weights kept, at most {' '.join(map(str, peaks))}"
    draw_strips(axes, strips, MEMORY["stash"], title, "kept")
