"""The bytes of a rank at each ZeRO stage for a layout with several axes, by the code that plans clusters.

Proved by: tests/planning/test_cluster.py
"""

from collections.abc import Mapping
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import check_count
from minidist.planning.cluster.layout import RECOMPUTE, ClusterLayout, Job, check_layout
from minidist.planning.cluster.memory import memory_by_rank
from minidist.planning.huggingface_config import read_model
from minidist.planning.memory_estimator import NOT_COUNTED

AXES = ("dp", "tp", "pp", "cp", "ep")


def layout_peak(
    name: str, degrees: Mapping[str, int], batch: int, length: int | None, recompute: str
) -> dict[str, Any]:
    """Return {"model", "parameters", "stage0": {kind: bytes, "total"}, ...} of the fullest pipeline rank.

    degrees: of the axes, 1 for one that is not given. batch: sequences of a micro-batch; there are as many
    micro-batches as pipeline ranks, which fill a 1F1B pipeline. Tensor parallelism divides the sequence too. Attention
    is fused. Errors: UsageError for degrees that do not divide the model.
    """
    model = read_model(name)
    if recompute not in RECOMPUTE:
        raise UsageError(f"--recompute {quoted(recompute)} with several axes; it must be {', '.join(RECOMPUTE)}")
    dp, tp, pp, cp, ep = sizes = [degrees.get(axis, 1) for axis in AXES]
    for flag, count in zip((*AXES, "batch"), (*sizes, batch), strict=True):
        check_count(count, f"--{flag}", 1, 10**6)
    length = model.positions if length is None else length
    check_count(length, f"--seq for {quoted(name, marks=False)}", 1, model.positions)
    job = Job(model, length, dp * batch * pp, "bf16", dp * tp * pp * cp)
    result: dict[str, Any] = {"model": name, "parameters": model.parameters}
    for stage in range(4):
        layout = ClusterLayout(dp, tp, pp, cp, ep, 1, stage, tp > 1, batch, pp, recompute)
        check_layout(layout, job)
        fullest = max(memory_by_rank(layout, job), key=lambda rank: rank.peak)
        result[f"stage{stage}"] = {**fullest.by_kind, "total": fullest.peak}
    return {**result, "not_counted": NOT_COUNTED}
