"""Which layers make a stage: a pipeline is as fast as its slowest stage.

    layers   | 5 | 9 | 4 | 2 | 2 | 8 |
    stages   |   14  |   8       | 8 |        contiguous; PipeDream may give a stage several machines instead

GPipe's cut makes the costs differ least; PipeDream's dynamic programme also replicates stages, because a layer that is
slow and has few weights is better copied than cut. Sources: Huang et al., GPipe, NeurIPS 2019; Harlap et al.,
arXiv:1806.03377, section 3.2; Narayanan et al., PipeDream, SOSP 2019.

Proved by: tests/pipeline/test_partition.py
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.limits import MAX_VALUE, check_size
from minidist.base.read_file import read_json
from minidist.core.base.layout import chunk_sizes, offsets

MAX_PROBLEM = 200_000  # layers x machines; PipeDream's optimizer works for the square of it
OBJECTIVES = ("released", "paper")
METHODS = ("pipedream", "gpipe", "time", "parameters", "uniform")
FIELDS = ("op", "fwd_ms", "bwd_ms", "act_bytes", "param_bytes")


@dataclass(frozen=True)
class Layer:
    """One layer of a profile: milliseconds of forward and backward, bytes of its output and of its parameters."""

    op: str
    fwd_ms: float
    bwd_ms: float
    act_bytes: float
    param_bytes: float


@dataclass(frozen=True)
class Stage:
    """Layers first..last (both included, from 0), on `replicas` machines."""

    first: int
    last: int
    replicas: int = 1


@dataclass(frozen=True)
class Partition:
    """Stages in order, and the seconds per mini-batch of the slowest stage or link."""

    slowest_stage_seconds: float
    stages: list[Stage]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `minidist partition`."""
        return {"slowest_stage_seconds": self.slowest_stage_seconds, "stages": [vars(stage) for stage in self.stages]}


def read_profile(source: str) -> list[Layer]:
    """Return the layers of a profile.

    source: FILE, a JSON list of {"op", "fwd_ms", "bwd_ms", "act_bytes", "param_bytes"}; or FILE:NAME, a list in a file
    of several.
    """
    path, name = Path(source), ""
    if not path.is_file() and ":" in source:
        front, _, name = source.rpartition(":")
        path = Path(front)
    data = read_json(path, "the profile", "give a JSON file, or FILE:NAME")
    if isinstance(data, dict) and isinstance(data.get("profiles"), dict):
        data = data["profiles"]
    if isinstance(data, dict):
        profiles = {key: value for key, value in data.items() if isinstance(value, list)}
        if name not in profiles:
            hint = f"has no profile {quoted(name)}{nearest(name, profiles)}" if name else "holds several profiles"
            raise UsageError(
                f"{quoted_path(path)} {hint}; write FILE:NAME with one of {', '.join(profiles) or 'no names'}"
            )
        data = profiles[name]
    if not isinstance(data, list) or not data:
        raise UsageError(
            f"profile {quoted_path(source)} must be a list of layers and not empty; a layer has {', '.join(FIELDS)}"
        )
    return [_layer(entry, number, source) for number, entry in enumerate(data)]


def read_stages(path: str) -> list[Stage] | None:
    """Return the stages of a file that `minidist partition --json` has written; None for a file of another kind."""
    if not path.endswith(".json") or not Path(path).is_file():
        return None
    data = read_json(Path(path), "the partition", "give the JSON of minidist partition")
    if not isinstance(data, dict) or not isinstance(data.get("stages"), list):
        return None
    stages: list[Stage] = []
    for number, entry in enumerate(data["stages"]):
        first = stages[-1].last + 1 if stages else 0
        values = [entry.get(name) if isinstance(entry, dict) else None for name in ("first", "last", "replicas")]
        start, last, replicas = (value if type(value) is int else -1 for value in values)
        if start != first or not first <= last < MAX_PROBLEM or not 1 <= replicas < MAX_PROBLEM:
            raise UsageError(
                f"partition {quoted_path(path)}, stage {number} is {quoted(entry)}; it must have whole numbers first"
                f" ({first}), last, which is not below it, and replicas, at least 1"
            )
        stages.append(Stage(start, last, replicas))
    return stages


def _layer(entry: Any, number: int, source: str) -> Layer:
    where = f"profile {quoted_path(source)}, layer {number}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is {quoted(entry)}; it must be an object with {', '.join(FIELDS)}")
    values = []
    for name in FIELDS[1:]:
        value = entry.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < MAX_VALUE:
            raise UsageError(
                f"{where}: {name} is {quoted(value)}; it must be a number of at least 0 and below {MAX_VALUE:g}"
            )
        values.append(float(value))
    return Layer(str(entry.get("op", "")), *values)


def uniform(layers: int, parts: int) -> list[Stage]:
    """Return stages of equally many layers; the first ones get one more."""
    _check_parts(layers, parts)
    bounds = offsets(chunk_sizes(layers, parts))
    return [Stage(a, b - 1) for a, b in pairwise(bounds)]


def by_cost(costs: Sequence[float], parts: int) -> list[Stage]:
    """Return GPipe's cut: contiguous stages whose summed costs differ least, by the smallest sum of squares."""
    _check_parts(len(costs), parts)
    return _cut(costs, parts, lambda best, cost: best + cost * cost)


def by_slowest(costs: Sequence[float], parts: int, paces: Sequence[float] | None = None) -> list[Stage]:
    """Return the contiguous stages whose most expensive one costs least.

    paces: of each stage, by which the costs of its layers are multiplied, where machines differ; 1 by default.
    """
    _check_parts(len(costs), parts)
    return _cut(costs, parts, max, paces)


def _check_parts(layers: int, parts: int) -> None:
    if parts < 1:
        raise UsageError(f"cannot cut into {parts} stages; there must be at least 1")
    if parts > layers:
        s = "" if layers == 1 else "s"
        raise UsageError(f"cannot cut {layers} layer{s} into {parts} stages; take at most {layers} stage{s}")


def _cut(
    costs: Sequence[float], parts: int, combine: Callable[[float, float], float], paces: Sequence[float] | None = None
) -> list[Stage]:
    # Dynamic programme over stages: best[j] is the value of the first j layers in `part` stages.
    total = [0.0, *np.cumsum(np.array(costs, float)).tolist()]
    n, pace = len(costs), [1.0] * parts if paces is None else paces
    best = [combine(0.0, total[j] * pace[0]) for j in range(n + 1)]  # with one stage
    cuts: list[list[int]] = []
    for part in range(2, parts + 1):
        row, cut = [math.inf] * (n + 1), [0] * (n + 1)
        for j in range(part, n + 1):
            row[j], cut[j] = min(
                (combine(best[i], (total[j] - total[i]) * pace[part - 1]), i) for i in range(part - 1, j)
            )
        best = row
        cuts.append(cut)

    # Back from the last layer along the cuts.
    end, stages = n, []
    for cut in reversed(cuts):
        stages.append(Stage(cut[end], end - 1))
        end = cut[end]
    return [Stage(0, end - 1), *reversed(stages)]


def partition(layers: Sequence[Layer], method: str, parts: int) -> Partition:
    """Return contiguous stages by a named method, one machine each; `pipedream` is a separate function.

    gpipe: the summed times differ least. time: the slowest stage is as fast as possible. parameters: their bytes differ
    least. uniform: equally many layers.
    """
    if method not in METHODS or method == "pipedream":
        choices = [name for name in METHODS if name != "pipedream"]
        raise UsageError(f"--method {quoted(method)}{nearest(method, METHODS)}; it must be one of {', '.join(choices)}")
    seconds = [(layer.fwd_ms + layer.bwd_ms) / 1000 for layer in layers]
    if method == "uniform":
        stages = uniform(len(layers), parts)
    elif method == "time":
        stages = by_slowest(seconds, parts)
    else:
        stages = by_cost(seconds if method == "gpipe" else [layer.param_bytes for layer in layers], parts)
    return Partition(max(sum(seconds[stage.first : stage.last + 1]) for stage in stages), stages)


def _check_problem(layers: Sequence[Layer], machines: int, objective: str, memory_limit: float | None) -> None:
    """Raise UsageError for a problem that the optimizer cannot solve, or not in time."""
    if objective not in OBJECTIVES:
        raise UsageError(
            f"objective {quoted(objective)}{nearest(objective, OBJECTIVES)}; it must be one of {', '.join(OBJECTIVES)}"
        )
    if machines < 1:
        raise UsageError(f"--machines is {machines}; it must be at least 1")
    if len(layers) * machines > MAX_PROBLEM:
        raise UsageError(
            f"--machines is {machines}; PipeDream's optimizer would take hours for {len(layers)} layers; use at most"
            f" {MAX_PROBLEM // len(layers)}"
        )
    if memory_limit is not None and not memory_limit > 0:
        raise UsageError(f"--memory-limit is {memory_limit}; it must be above 0 bytes")


def pipedream(
    layers: Sequence[Layer],
    machines: int,
    bandwidth: float,
    objective: str = "released",
    memory_limit: float | None = None,
) -> Partition:
    """Return the stages and replicas of PipeDream's optimizer, for links of `bandwidth` bytes per second.

    A(j, k): time of the slowest stage when layers 1..j run on k machines; its last stage i+1..j takes k' of them:
    A(j, k) = min over i, k' of max(A(i, k-k'), L, T(i+1..j, k')), with sync = 4 (k'-1) weights/(bandwidth k').
    Objective "paper": T = max(compute, sync)/k', L = 2 act(i)/bandwidth, the boundary before the stage.
    Objective "released" (the published program, with activations that are not compressed): T = (compute + sync)/k', and
    L is the larger of 2 act(i)/(bandwidth k') and, unless j is the last layer, 2 act(j)/(bandwidth k'): the k' machines
    of a stage share its boundaries. The first stage (i = 0) has no L; its output is the next stage's input.
    memory_limit: bytes of a machine; a stage holds ceil(machines from it on / k') copies of its weights and
    activations.
    """
    _check_problem(layers, machines, objective, memory_limit)
    check_size(bandwidth, "--bandwidth", zero=False)

    # Prefix sums over the layers: seconds, bytes of weights, bytes that a stage holds; and the time of each boundary.
    n = len(layers)
    seconds = np.concatenate([[0.0], np.cumsum([(layer.fwd_ms + layer.bwd_ms) / 1000 for layer in layers])])
    weights = np.concatenate([[0.0], np.cumsum([layer.param_bytes for layer in layers])])
    held = np.concatenate([[0.0], np.cumsum([layer.param_bytes + layer.act_bytes for layer in layers])])
    link = np.array([0.0, *(2 * layer.act_bytes / bandwidth for layer in layers)])  # link[i]: after the first i layers
    replicas = np.arange(1, machines + 1)

    def stage_time(j: int) -> Any:
        """Return [i, k'-1]: seconds of the stage of layers i+1..j, or of its boundaries, if these take longer."""
        compute = (seconds[j] - seconds[:j])[:, None]
        sync = 4 * (replicas - 1) * (weights[j] - weights[:j])[:, None] / (bandwidth * replicas)
        if objective == "paper":
            return np.maximum(np.maximum(compute, sync) / replicas, link[:j, None])

        # The released program: input and output of every stage but the first, divided by the stage's machines.
        borders = np.maximum(link[:j], link[j] if j < n else 0.0)
        borders[0] = 0.0
        return np.maximum(compute + sync, borders[:, None]) / replicas

    # A(j, k) of the docstring, and the i and k' that make it.
    best = np.full((n + 1, machines + 1), np.inf)  # [j, k]
    best[0, 0] = 0.0
    choice = np.zeros((n + 1, machines + 1, 2), int)
    for j in range(1, n + 1):
        time = stage_time(j)
        for k in range(1, machines + 1):
            options = np.maximum(
                best[:j, k - 1 :: -1][:, :k], time[:, :k]
            )  # [i, k'-1]: A(i, k-k'), or T if that is longer
            if memory_limit is not None:
                copies = np.ceil((machines - k + replicas[:k]) / replicas[:k])
                options = np.where(copies * (held[j] - held[:j])[:, None] > memory_limit, np.inf, options)
            where = int(np.argmin(options))
            best[j, k] = options.flat[where]
            choice[j, k] = where // k, where % k + 1
    _check_fits(best[n, machines], machines, memory_limit)
    return Partition(float(best[n, machines]), _stages(choice, n, machines))


def _check_fits(seconds: float, machines: int, memory_limit: float | None) -> None:
    """Raise UsageError when no partition was found, whose slowest stage takes infinite `seconds`."""
    if not np.isfinite(seconds):
        raise UsageError(
            f"no partition on {machines} machines fits in {memory_limit:g} bytes each; take more machines or more"
            " memory"
        )


def _stages(choice: np.ndarray, layers: int, machines: int) -> list[Stage]:
    """Return the stages: back from the last layer along the choices."""
    stages, j, k = [], layers, machines
    while j:
        i, used = (int(x) for x in choice[j, k])
        stages.append(Stage(i, j - 1, used))
        j, k = i, k - used
    return stages[::-1]
