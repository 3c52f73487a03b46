"""Compares the planner with runs that a user has measured: how far its seconds and bytes are off, for each source.

A file of rows is a JSON list, or an object with a list "rows". A row is an object with the names of `minidist plan`'s
flags, and what was measured:

    {"source": "our cluster", "model": "llama-3.1-8b", "gpu": "h100", "ranks": 64, "seq": 8192, "global_batch": 256,
     "dp": 64, "zero": 3, "micro_batch": 1, "recompute": "full", "kernels": "fused", "step_seconds": 9.4}

model: a name, a config.json, or an object with sizes. Measured: `step_seconds`, `tokens_per_second` (of all GPUs),
`peak_bytes` (of the fullest GPU, as the allocator counts), `fits` (true, or false for a run that was out of memory).
What a row does not say of its run (recomputation, the attention kernel, other kernels) is planned both ways: the
prediction is that of the defaults, and its range has all answers.

Proved by: tests/planning/test_measured.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.limits import check_count
from minidist.base.read_file import read_json
from minidist.planning.architecture import Architecture, from_sizes
from minidist.planning.cluster.calibration import CALIBRATION
from minidist.planning.cluster.gpus import PRECISIONS, machine_of
from minidist.planning.cluster.layout import ATTENTION, FRAMEWORKS, KERNELS, RECOMPUTE, ClusterLayout, Job, check_layout
from minidist.planning.cluster.search import Plan
from minidist.planning.huggingface_config import read_model

MEASURED = ("step_seconds", "tokens_per_second", "peak_bytes", "fits")
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated", "tied", "experts", "top_k")
COUNTS = ("ranks", "seq", "global_batch", "dp", "tp", "pp", "cp", "ep", "etp", "vp", "micro_batch")
CHOICES: dict[str, Sequence[str]] = {
    "precision": PRECISIONS,
    "attention": ATTENTION,
    "kernels": tuple(KERNELS),
    "framework": tuple(FRAMEWORKS),
    "recompute": RECOMPUTE,
}
KEYS = ("source", "model", "gpu", *COUNTS, "zero", "sequence_parallel", "dropout", *CHOICES, *MEASURED)
# What a row may leave out, with the answers: the first one is the prediction, all of them are the range.
UNKNOWN = {"recompute": ("none", "full"), "attention": ("fused", "unfused"), "kernels": ("any", "fused", "eager")}
REMEDY = "give a JSON list of objects with the names of minidist plan's flags, and what was measured"


class Comparison(NamedTuple):
    """One measured value and its predictions: that of the defaults, and the least and the most of all answers."""

    source: str
    what: str
    row: int  # from 1
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Return predicted / measured."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class Summary:
    """How the planner does on one quantity of one source.

    error: the mean of |predicted / measured - 1|; of `fits` the share of wrong answers. ratio: the median of predicted
    / measured. order: Spearman's rank correlation, None for fewer than three rows. inside: the share of the rows whose
    range has the measured value. wrongly_fit: of `fits`, how many are said to fit and did not.
    """

    source: str
    what: str
    rows: int
    error: float
    ratio: float | None
    order: float | None
    inside: float
    wrongly_fit: int | None = None


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a file; UsageError names the row and the key that is wrong."""
    content = read_json(path, "the file of rows", REMEDY)
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{quoted_path(path)} has no rows; {REMEDY}")
    for number, row in enumerate(rows, 1):
        where = f" in row {number} of {quoted_path(path)}"
        if not isinstance(row, dict):
            raise UsageError(f"row {number} of {quoted_path(path)} is {quoted(row)}; {REMEDY}")
        _check_row(row, where)
    return rows


def _check_row(row: Mapping[str, Any], where: str) -> None:
    """Raise UsageError for a key that is unknown or missing, or a value that it cannot have."""
    for key, value in row.items():
        if key not in KEYS:
            raise UsageError(f"key {quoted(key)}{where} is unknown{nearest(key, KEYS)}; leave it out")
        _check_value(key, value, where)
    for key in ("model", "gpu", "global_batch"):
        if key not in row:
            raise UsageError(f"{key} is missing{where}; add it")
    if not any(key in row for key in MEASURED):
        raise UsageError(f"nothing is measured{where}; add one of {', '.join(MEASURED)}")


def _check_value(key: str, value: Any, where: str) -> None:
    """Raise UsageError for a value that a key of a row cannot have; the model is checked where it is read."""
    if key in COUNTS:
        check_count(_whole(value, key, where), key + where, 1, 10**9)
    elif key == "zero":
        check_count(_whole(value, key, where), key + where, 0, 3)
    elif key in CHOICES and value not in list(CHOICES[key]):
        raise UsageError(f"{key} {quoted(value)}{where}; it must be one of {', '.join(CHOICES[key])}")
    elif key in ("sequence_parallel", "dropout", "fits") and not isinstance(value, bool):
        raise UsageError(f"{key} {quoted(value)}{where}; it must be true or false")
    elif key in MEASURED[:3] and not (type(value) in (int, float) and 0 < value < 1e30):
        raise UsageError(f"{key} {quoted(value)}{where}; it must be a number above 0")
    elif key in ("gpu", "source") and not isinstance(value, str):
        raise UsageError(f'{key} {quoted(value)}{where}; it must be a string, such as "h100"')


def _whole(value: Any, key: str, where: str) -> int:
    """Return a whole number; UsageError for another value."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{key} {quoted(value)}{where}; it must be a whole number")
    return value


def _model(row: Mapping[str, Any], where: str) -> Architecture:
    """Return the model of a row."""
    model = row["model"]
    if isinstance(model, str):
        return read_model(model)
    if not isinstance(model, dict):
        raise UsageError(f"model {quoted(model)}{where}; it must be a name, a config.json, or an object with sizes")
    for key, value in model.items():
        if key not in SIZES:
            raise UsageError(f"key {quoted(key)} of the model{where} is unknown{nearest(key, SIZES)}; leave it out")
        if key not in ("gated", "tied"):
            _whole(value, key, where)
        elif not isinstance(value, bool):
            raise UsageError(f"{key} {quoted(value)}{where}; it must be true or false")
    return from_sizes({"seq": row.get("seq"), **model}, where)


def plans(row: Mapping[str, Any], where: str) -> list[Plan]:
    """Return the plans of a row: first the prediction, then one for each other answer to what the row does not say.

    Errors: UsageError for a layout that is not possible.
    """
    model, machine = _model(row, where), machine_of(row["gpu"])
    tp, pp, cp = (row.get(axis, 1) for axis in ("tp", "pp", "cp"))
    dp = row.get("dp", max(1, row.get("ranks", 1) // (tp * pp * cp)))
    length, micro = row.get("seq", model.positions), row.get("micro_batch", 1)
    choices = {key: (row[key],) if key in row else answers for key, answers in UNKNOWN.items()}
    found = []
    for recompute, attention, kernels in product(*choices.values()):
        layout = ClusterLayout(
            *(dp, tp, pp, cp, row.get("ep", 1), row.get("vp", 1), row.get("zero", int(dp > 1))),
            *(row.get("sequence_parallel", False), micro, max(1, row["global_batch"] // (dp * micro)), recompute),
            row.get("etp"),
        )
        job = Job(
            *(model, length, row["global_batch"], row.get("precision", "bf16"), row.get("ranks", layout.ranks)),
            attention != "unfused",
            row.get("dropout"),
            kernels=kernels,
            attention_kernel=attention,
            framework=row.get("framework", "any"),
        )
        check_layout(layout, job)
        found.append(Plan(layout, job, machine))
    return found


def _values(plan: Plan, what: str) -> tuple[float, float, float]:
    """Return what a plan predicts of a measured quantity: the least, the central estimate, the most."""
    short, long = plan.seconds_range
    tokens = plan.job.global_batch * plan.job.length
    if what == "fits":
        return float(plan.fit.verdict == "yes"), float(plan.fits), float(plan.fit.low <= plan.machine.memory)
    if what == "peak_bytes":
        reserved = CALIBRATION.reserved_bytes
        return plan.fit.low - reserved, plan.fit.central - reserved, plan.fit.high - reserved
    if what == "step_seconds":
        return short, plan.time.seconds, long
    return tokens / long, plan.tokens_per_second, tokens / short


def compare(rows: Sequence[Mapping[str, Any]], path: str | Path) -> tuple[list[Comparison], list[str]]:
    """Return every measured value next to its prediction, and a sentence for each row that cannot be planned."""
    found, left_out = [], []
    for number, row in enumerate(rows, 1):
        try:
            of_row = plans(row, f" in row {number} of {quoted_path(path)}")
        except UsageError as error:
            left_out.append(f"row {number} is left out: {error}")
            continue
        for what in MEASURED:
            if what in row:
                low, central, high = zip(*(_values(plan, what) for plan in of_row), strict=True)
                source = row.get("source", "rows")
                found.append(Comparison(source, what, number, float(row[what]), central[0], min(low), max(high)))
    return found, left_out


def summaries(found: Sequence[Comparison]) -> list[Summary]:
    """Return how the planner does on each quantity of each source."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for one in found:
        groups.setdefault((one.source, one.what), []).append(one)
    return [_summary(source, what, group) for (source, what), group in groups.items()]


def _summary(source: str, what: str, group: Sequence[Comparison]) -> Summary:
    inside = fmean(one.low <= one.measured <= one.high for one in group)
    if what == "fits":
        wrong = fmean(one.predicted != one.measured for one in group)
        falsely = sum(one.predicted > one.measured for one in group)
        return Summary(source, what, len(group), wrong, None, None, inside, falsely)
    ratios = [one.ratio for one in group]
    order = spearman([one.measured for one in group], [one.predicted for one in group])
    error = fmean(abs(ratio - 1) for ratio in ratios)
    return Summary(source, what, len(group), error, median(ratios), order, inside)


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the correlation of the ranks of two lists, in which equal values have the mean of their ranks.

    None for fewer than three values, and where all values of a list are equal.
    """
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray = (ends - (counts - 1) / 2)[places]
    return ranks


def table(of: Sequence[Summary]) -> str:
    """Format the summaries, one per line."""
    lines = [f"{'source':24}  {'measured':18}{'rows':>5}  {'error':>6}  {'ratio':>6}  {'order':>6}  {'in range':>8}"]
    for one in of:
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        order = "" if one.order is None else f"{one.order:.3f}"
        lines.append(
            f"{one.source[:24]:24}  {one.what:18}{one.rows:5}  {one.error:6.1%}  {ratio:>6}  {order:>6}"
            f"  {one.inside:8.0%}" + (f"  {one.wrongly_fit} said to fit that did not" if one.what == "fits" else "")
        )
    return "\n".join(lines)


def worst(found: Sequence[Comparison], most: int = 8) -> list[Comparison]:
    """Return the values whose predictions are furthest off."""
    numbers = [one for one in found if one.what != "fits"]
    return sorted(numbers, key=lambda one: abs(np.log(one.ratio)), reverse=True)[:most]
