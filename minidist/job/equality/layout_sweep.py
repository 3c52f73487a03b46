"""The layout sweep: every valid layout of some ranks, each compared with one device.

    (pp, dp, cp, tp) with the product of the ranks  x  ZeRO stage  x  schedule  x  recomputation  x  precision  x
    sequence parallel

There is no list of valid layouts: the rules of every job (job/config/rules.py) check each combination, and those that a
rule refuses are counted under its sentence. So the sweep grows when a rule is removed. Each layout trains the same
small GPT in the simulated world, and every loss, gradient, weight and optimizer state of every step is compared, in the
tier that applies to the layout.

Proved by: tests/equality/test_layout_sweep.py
"""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from minidist.base.process import tune_process
from minidist.comm import SimWorld
from minidist.core.base.errors import MinidistError, UsageError
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches, resolve_dims
from minidist.job.equality.compare import compare_rank, tier_of
from minidist.job.equality.expected import expected_snapshots

# Small, but with everything that a layout could break: several blocks, heads for every degree, clipping.
JOB: dict[str, Any] = {
    "model": "gpt",
    "layers": 4,
    "width": 16,
    "heads": 8,
    "context": 16,
    "data": "markov",
    "steps": 2,
    "lr": 1e-3,
    "clip": 1.0,
    "global_batch": 8,
    "reduction": "ordered",
}
# Small, so that there are several buckets.
BUCKETS: dict[int, dict[str, Any]] = {
    0: {"bucket_cap_mb": 0.01},
    1: {"reduce_bucket_size": 3000},
    2: {"reduce_bucket_size": 3000},
    3: {},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe")
RECOMPUTE = ("none", "selective", "full") if "recompute" in TrainConfig.model_fields else ("none",)
PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
LAYOUT = ("pp", "dp", "cp", "tp", "zero", "schedule", "recompute", "precision", "sequence_parallel")
Layout = dict[str, Any]  # the fields of LAYOUT


@dataclass(frozen=True)
class Row:
    """The verdict of one layout. difference: the largest of any kind. seconds: of the run and its reference."""

    layout: Layout
    tier: str
    equal: bool
    difference: float
    first_difference: str | None
    tensors: int
    seconds: float


def name_of(layout: Layout) -> str:
    """Return a layout as flags, without those that have their default."""
    words = [f"--{axis} {layout[axis]}" for axis in ("pp", "dp", "cp", "tp") if layout[axis] > 1]
    if layout["pp"] > 1:
        words.append(f"--schedule {layout['schedule']}")
    words += ["--sequence-parallel"] if layout["sequence_parallel"] else []
    words += [f"--zero {layout['zero']}"] if layout["zero"] else []
    words += [f"--recompute {layout['recompute']}"] if layout["recompute"] != "none" else []
    return " ".join([*words, f"--precision {layout['precision']}"])


def degrees(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (pp, dp, cp, tp) whose product is `ranks`."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, dp, cp in itertools.product(divisors, repeat=3):
        if ranks % (pp * dp * cp) == 0:
            yield pp, dp, cp, ranks // (pp * dp * cp)


def combinations(ranks: int) -> Iterator[Layout]:
    """Yield all combinations; schedules only with a pipeline, sequence parallelism only with tensor parallelism."""
    for axes, zero, recompute, precision in itertools.product(degrees(ranks), range(4), RECOMPUTE, PRECISIONS):
        pp, _, _, tp = axes
        # One schedule stands for all where there is no pipeline to schedule.
        schedules, sequence_parallel = SCHEDULES if pp > 1 else ("1f1b",), (False, True) if tp > 1 else (False,)
        for schedule, parts in itertools.product(schedules, sequence_parallel):
            values = (*axes, zero, schedule, recompute, precision, parts)
            yield dict(zip(LAYOUT, values, strict=True))


def config_of(layout: Layout, **job: Any) -> TrainConfig:
    """Return the job of a layout; job: settings that replace those of JOB.

    Long pipelines get a block for each of their ranks, and micro-batches that fill them; others accumulate over two.
    """
    batch = {**JOB, **job}["global_batch"]
    fitted = {
        "layers": max(JOB["layers"], layout["pp"]),
        "accumulation": max(1, min(batch // layout["dp"], 2 * layout["pp"])),
    }
    # Without the settings of techniques that are not installed.
    given = {**JOB, **BUCKETS[layout["zero"]], **fitted, **job, **layout}
    return TrainConfig.make(**{name: value for name, value in given.items() if name in TrainConfig.model_fields})


def refusal(layout: Layout, ranks: int, **job: Any) -> str:
    """Return the sentence with which a layout is refused; "" when it is valid."""
    try:
        config = config_of(layout, **job)
        batches = resolve_batches(config, ranks)
        # What no tier covers cannot be compared, so it is refused, too.
        tier_of(config, batches.dims)
        check_rules(config, batches)
    except UsageError as error:
        return str(error)
    return ""


def enumerate_layouts(ranks: int, **job: Any) -> tuple[list[Layout], Counter[str]]:
    """Return the valid layouts, and how many combinations each sentence refused."""
    valid, refused = [], Counter[str]()
    for layout in combinations(ranks):
        why = refusal(layout, ranks, **job)
        if why:
            refused[why] += 1
        else:
            valid.append(layout)
    return valid, refused


def stratified(layouts: Sequence[Layout], count: int, seed: int = 0) -> list[Layout]:
    """Choose `count` layouts, each one that adds the most settings and pairs of settings not covered yet.

    The choice depends on the seed alone.
    """
    # Greedy cover: a layout counts by the settings, and the pairs of settings, that no chosen one has.
    order = np.random.default_rng(seed).permutation(len(layouts))
    left = [layouts[i] for i in order]
    seen: set[Any] = set()
    chosen: list[Layout] = []
    features = {id(layout): _features(layout) for layout in left}
    while left and len(chosen) < count:
        best = max(left, key=lambda layout: len(features[id(layout)] - seen))
        seen |= features[id(best)]
        chosen.append(best)
        left.remove(best)
    return chosen


def _features(layout: Layout) -> set[Any]:
    values = [(name, value) for name, value in layout.items() if name != "schedule" or layout["pp"] > 1]
    # Single settings, and pairs: most mistakes need two settings that meet.
    return {*values, *itertools.combinations(values, 2)}


def judge(layout: Layout, ranks: int, job: dict[str, Any]) -> Row:
    """Train on `ranks` simulated ranks and on one device, and compare all tensors; an error counts as a difference."""
    began = time.perf_counter()
    config = config_of(layout, **job)
    tier = tier_of(config, resolve_dims(config, ranks))
    try:
        # A deadlock or a mismatch that the simulated world reports is a verdict, too.
        verdict = SimWorld(ranks, record=False).run(compare_rank, config, expected_snapshots(config, ranks))[0]
    except MinidistError as error:
        found: tuple[bool, float, str | None, int] = (False, float("nan"), f"{type(error).__name__}: {error}", 0)
    else:
        largest = max(verdict.max_difference.values())
        found = (verdict.equal, largest, verdict.first_difference, verdict.tensors)
    return Row(layout, tier, *found, time.perf_counter() - began)


def run_sweep(layouts: Sequence[Layout], ranks: int, processes: int = 1, **job: Any) -> Iterator[Row]:
    """Yield a row for each layout, computed by `processes` processes (each with one BLAS thread)."""
    one = partial(judge, ranks=ranks, job=job)
    if processes == 1:
        yield from map(one, layouts)
        return
    # Each process sets its number of BLAS threads before it computes: bits depend on it.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=tune_process) as pool:
        yield from pool.map(one, layouts)


def line(row: Row) -> str:
    """Return a row of the table, as text."""
    verdict = "equal" if row.equal else "DIFFERS"
    text = f"{verdict:8}{row.tier:8} {row.difference:8.1e}  {name_of(row.layout)}"
    return text if row.equal else f"{text}\n        {row.first_difference}"


def summary(rows: Sequence[Row], refused: Counter[str], seconds: float) -> str:
    """Return the lines below the table: how many layouts are equal, in which tier, and what was refused."""
    tiers = Counter(row.tier for row in rows)
    worst = {tier: max((row.difference for row in rows if row.tier == tier), default=0.0) for tier in tiers}
    bad = sum(not row.equal for row in rows)
    lines = [
        f"{len(rows)} layouts in {seconds:.0f} s: "
        + ", ".join(f"{n} in the {tier} tier (largest difference {worst[tier]:.1e})" for tier, n in tiers.items()),
        "all equal one device" if not bad else f"{bad} DIFFER from one device",
        f"{sum(refused.values())} combinations are refused:",
    ]
    return "\n".join([*lines, *(f"  {count:5}  {why}" for why, count in refused.most_common())])


def as_dict(rows: Iterable[Row], refused: Counter[str], ranks: int, seconds: float) -> dict[str, Any]:
    """Return the dictionary that `--json` prints."""
    listed = [{**asdict(row), "name": name_of(row.layout)} for row in rows]
    return {
        "ranks": ranks,
        "layouts": listed,
        "equal": all(row["equal"] for row in listed),
        "refused": dict(refused),
        "seconds": seconds,
    }
