"""One run of an exhibit: the same job with the bug and without it, the difference, and the tests that catch it.

Proved by: tests/museum/test_museum.py
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.errors import reason
from minidist.base.records import WrongValue
from minidist.core.base.errors import MinidistError, UsageError
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import CheckResult, Exhibit, Patch, Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST_SCALE = 1e-300
BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Difference:
    """The largest |with - without| of one kind of tensor over all ranks, its place, and that tensor's largest entry."""

    largest: float = 0.0
    scale: float = 0.0
    name: str = ""
    rank: int = 0

    @property
    def ratio(self) -> float:
        """Return the difference relative to that entry."""
        return self.largest / max(self.scale, SMALLEST_SCALE)


@dataclass
class ExhibitRun:
    """What a run of an exhibit shows.

    said: the error that the job ended with, if any. checks: test -> what it did with the bug injected; empty when no
    tests were asked for."""

    exhibit: Exhibit
    right: Recording
    wrong: Recording | None
    said: str = ""
    differences: dict[str, Difference] = field(default_factory=dict)
    checks: dict[str, CheckResult] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "number": self.exhibit.number,
            "title": self.exhibit.title,
            "thread": self.exhibit.thread,
            "said": self.said,
            "losses": {"right": self.right.losses, "wrong": self.wrong.losses if self.wrong else None},
            "measured": {"right": self.right.measured, "wrong": self.wrong.measured if self.wrong else None},
            "max_difference": {kind: d.largest for kind, d in self.differences.items()},
            "largest": {kind: d.scale for kind, d in self.differences.items()},
            "caught_by": {
                str(catch): self.with_status("caught").get(str(catch), "") for catch in self.exhibit.caught_by
            },
            "not_run": self.with_status("not run"),
            "other_failures": self.with_status("other failure"),
        }

    def with_status(self, status: str) -> dict[str, str]:
        """Return the tests whose check ended with `status`, and the text of each."""
        return {test: result.text for test, result in self.checks.items() if result.status == status}

    def other_symptoms(self) -> str:
        """Return the error and the other measurements that differ, in a few words."""
        words = [textwrap.shorten(self.said.splitlines()[0], 90, placeholder=" ...")] if self.said else []
        measured = self.wrong.measured if self.wrong is not None else {}
        words += [
            f"{name} {value:,.0f} instead of {self.right.measured[name]:,.0f}"
            for name, value in measured.items()
            if value != self.right.measured[name]
        ]
        words += [
            f"|Δ{kind}| {percent(d.ratio)}"
            for kind, d in self.differences.items()
            if kind not in ("gradients", "weights") and d.largest
        ]
        return "; ".join(words)

    def text(self) -> str:
        """Return the whole run as text for a terminal."""
        lines = [f"{self.exhibit.number}  {self.exhibit.title}", "", textwrap.fill(self.exhibit.story, 110), ""]
        lines += [f"reported in {self.exhibit.thread}", ""] if self.exhibit.thread else []
        lines += [f"injected: {(self.exhibit.inject.__doc__ or '').strip()}", ""]

        # What the authors saw: two loss curves on one scale.
        if self.wrong is not None and self.right.losses:
            lines += [
                f"loss without  {curve(self.right.losses, self.wrong.losses)}",
                f"loss with     {curve(self.wrong.losses, self.right.losses)}",
            ]

        if self.said:
            lines += ["what minidist says:", *(f"    {line}" for line in self.said.splitlines())]
            if self.wrong is not None:
                lines.append("and without its checks:")

        # What they did not see: gradients, weights and other measurements that differ.
        for kind, d in self.differences.items():
            when = "after one step" if kind == "gradients" else f"after {len(self.right.losses)} steps"
            place = (
                f" in {d.name} on rank {d.rank}, whose largest entry is {d.scale:.3g} ({percent(d.ratio)})"
                if d.largest
                else ""
            )
            lines.append(f"max |difference| of {kind:9} {when:14} {d.largest:.3g}{place}")
        if self.wrong is not None:
            lines += [
                f"{name}: {value:,.0f} with, {self.right.measured[name]:,.0f} without"
                for name, value in self.wrong.measured.items()
            ]

        return "\n".join([*lines, "", "caught by", *self._catches()])

    def _catches(self) -> Iterator[str]:
        """Yield what catches the bug, and what each check has said."""
        for catch in self.exhibit.caught_by:
            yield f"    {catch}"
            result = self.checks.get(str(catch))
            if result is not None:
                said = (
                    result.text if result.status == "caught" else f"{result.status}: {result.text}".removesuffix(": ")
                )
                yield f"        {said[:160]}"

    def figure(self, command: str = "") -> "Figure":
        """Draw the two loss curves, with the difference of the weights in the title."""
        from minidist.report.loss_overlay import loss_overlay

        if self.wrong is None or not self.right.losses:
            raise UsageError(
                f"exhibit {self.exhibit.number} has no loss curve: {self.other_symptoms() or 'its job has no loss'};"
                " leave -o out"
            )
        parts = ", ".join(f"{kind} differ by {percent(d.ratio)}" for kind, d in self.differences.items())
        title = f"{self.exhibit.number}: {self.exhibit.title}" + (f" ({parts})" if parts else "")
        return loss_overlay(
            self.wrong.losses,
            self.right.losses,
            title=title,
            command=command,
            names=("without the bug", "with the bug"),
        )


def percent(ratio: float) -> str:
    """Return 0.5 as "50 %", and small ratios in powers of ten."""
    if ratio == 0:
        return "0"
    return f"{100 * ratio:.0f} %" if ratio >= 0.01 else f"{ratio:.0e}"


def curve(losses: Sequence[float], compared: Sequence[float]) -> str:
    """Return a loss curve as one line of text, on a scale that is also that of the curve `compared`."""
    everything = [value for value in (*losses, *compared) if np.isfinite(value)]
    low, high = min(everything), max(everything)
    marks = [
        BARS[round((value - low) / max(high - low, SMALLEST_SCALE) * (len(BARS) - 1))] if np.isfinite(value) else "!"
        for value in losses
    ]
    return f"{''.join(marks)}  {losses[0]:.4f} -> {losses[-1]:.4f}"


def compare(right: Recording, wrong: Recording) -> dict[str, Difference]:
    """Return the largest difference of each kind over all ranks and tensors; NaN counts as infinite."""
    result: dict[str, Difference] = {}
    for rank, (mine, theirs) in enumerate(zip(right.tensors, wrong.tensors, strict=True)):
        for kind, tensors in mine.items():
            worst = result.setdefault(kind, Difference())
            for name, expected in tensors.items():
                if not expected.size:
                    continue
                difference = float(np.max(np.abs(np.subtract(theirs[kind][name], expected, dtype=np.float64))))
                difference = difference if np.isfinite(difference) else np.inf
                if difference > worst.largest:
                    worst.largest, worst.scale, worst.name, worst.rank = (
                        difference,
                        float(np.max(np.abs(expected))),
                        name,
                        rank,
                    )
    return result


def run_exhibit(exhibit: Exhibit, tests: bool = True) -> ExhibitRun:
    """Run the exhibit's job without and with the bug and, with `tests`, the tests that catch it.

    Raises UsageError for the exhibit of a technique whose folder has been deleted.
    """
    try:
        right = exhibit.job()
    except WrongValue as error:
        if not error.unknown:
            raise
        raise UsageError(
            f"exhibit {exhibit.number} shows a bug in a technique that minidist/techniques does not have"
            f" ({reason(error)}); put its folder back, or take the exhibit out of minidist/course/museum/catalogue.toml"
        ) from None
    run = ExhibitRun(exhibit, right, None)
    with exhibit.injected():
        try:
            run.wrong = exhibit.job()
        except MinidistError as error:
            run.said = f"{type(error).__name__}: {error}"
            run.wrong = _unchecked(exhibit)
        if tests:
            run.checks = {str(catch): catch.check() for catch in exhibit.caught_by}
    if run.wrong is not None:
        run.differences = compare(right, run.wrong)
    return run


def _unchecked(exhibit: Exhibit) -> Recording | None:
    """Run the job with the bug and without minidist's checks; returns None when it does not get to its end."""
    patch = Patch()
    patch.setattr(jobs, "checks", lambda: False)
    try:
        return exhibit.job()
    except Exception:  # any error may follow from the bug where no check stops it
        return None
    finally:
        patch.undo()


def table(runs: Sequence[ExhibitRun]) -> str:
    """Return one line per exhibit: the losses, the differences, and how many of its tests failed as declared."""
    head = ("#", "bug", "last loss", "with it", "|Δgradient|", "|Δweight|", "caught by", "other symptoms")
    rows: list[tuple[str, ...]] = [head]

    for run in runs:
        losses, caught = ["", ""], len(run.with_status("caught"))
        if run.wrong is not None and run.right.losses:
            losses = [f"{run.losses[-1]:.3f}" for run in (run.right, run.wrong)]
        parts = [
            percent(run.differences[kind].ratio) if kind in run.differences else "" for kind in ("gradients", "weights")
        ]
        ran = any(result.status != "not run" for result in run.checks.values())
        tests = f"{caught} of {len(run.exhibit.caught_by)}" if ran else "not run"
        rows.append((run.exhibit.number, run.exhibit.title, *losses, *parts, tests, run.other_symptoms()))

    # The last column is as wide as its text.
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    return "\n".join(
        [
            *lines,
            "",
            *sorted({f"not run: {why}" for run in runs for why in run.with_status("not run").values()}),
            "|Δ|: the largest difference over all ranks, as a part of the largest entry of the tensor that it is in",
        ]
    )
