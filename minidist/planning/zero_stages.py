"""The bytes of a rank at each ZeRO stage, as `minidist memory` prints them.

Those of a model's whole step are the planner's; a bare number of parameters has only model states.

Mixed-precision Adam holds 16 bytes per parameter: 2 for the value, 2 for the gradient, 12 for the optimizer (a float32
copy and two moments). ZeRO divides them by the number of ranks, one kind after the other:

    stage 0    2 P + 2 P + 12 P          stage 2    2 P + (2 P + 12 P) / N
    stage 1    2 P + 2 P + 12 P / N      stage 3    (2 P + 2 P + 12 P) / N

Sources count differently, so every table names its accounting:

    megatron            gradients in float32: 18 P; at stage 3 the float32 shard is value and master copy: 16 P / N
    zero                the paper's, above (Rajbhandari et al., SC 2020, section 3.1 and figure 1)
    fp32-accumulation   gradients are added in float32 in addition to the 2-byte ones: 20 P (Ultra-Scale Playbook)
    deepspeed           the estimators in DeepSpeed's documentation: stage 2 4 P + 16 P / N, stage 3 4 L + 18 P / N,
                        with L the parameters of the largest layer, the single module with most parameters that no
                        other module has (an embedding or a linear layer, not a block)

Proved by: tests/planning/test_zero_stages.py
"""

from dataclasses import replace
from decimal import Decimal, InvalidOperation
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import check_count
from minidist.planning.block_bytes import fused, unfused
from minidist.planning.cluster.layout import ACCOUNTINGS, ClusterLayout, Job, check_layout
from minidist.planning.cluster.memory import RankMemory, divided_states, memory_by_rank

ESTIMATORS = (*ACCOUNTINGS, "deepspeed")
STATES = ("parameters", "gradients", "optimizer")
# Kind of state -> bytes of one rank.
Stage = dict[str, int]


def check_accounting(accounting: str) -> None:
    """Raise UsageError for an accounting that does not exist."""
    if accounting not in ESTIMATORS:
        raise UsageError(
            f"there is no accounting {quoted(accounting)}{nearest(accounting, ESTIMATORS)}; there are"
            f" {', '.join(ESTIMATORS)}"
        )


def model_states(parameters: int, ranks: int, accounting: str = "zero", largest_layer: int = 0) -> dict[str, Stage]:
    """Return {"stage0": {"parameters": bytes, "gradients":, "optimizer":, "total":}, ...} of one of `ranks` ranks.

    A shard is rounded up to whole elements. largest_layer: its parameters (`Architecture.largest_module`), for
    `deepspeed`, which has no estimator for stages 0 and 1. Errors: UsageError for counts below 1 and for an unknown
    accounting.
    """
    if parameters < 1 or ranks < 1:
        raise UsageError(f"{quoted(parameters)} parameters on {quoted(ranks)} ranks; both must be at least 1")
    check_count(ranks, "--dp")
    check_accounting(accounting)
    if accounting == "deepspeed":
        stages = _deepspeed_states(parameters, ranks, largest_layer)
    else:
        stages = {
            f"stage{zero}": divided_states(parameters, ranks, zero, ACCOUNTINGS[accounting][zero == 3])
            for zero in range(4)
        }
    return {stage: with_total(parts) for stage, parts in stages.items()}


def with_total(parts: Stage) -> Stage:
    """Return the kinds of bytes with their sum."""
    return {**parts, "total": sum(parts.values())}


def _deepspeed_states(parameters: int, ranks: int, largest_layer: int) -> dict[str, Stage]:
    """Return DeepSpeed's estimates without states on the host; float32 gradients count as optimizer state."""
    shard = int(2 * parameters / ranks)
    whole = (2 * parameters, 2 * parameters, int(16 * parameters / ranks))
    sharded = (2 * largest_layer + shard, 2 * largest_layer, int(18 * parameters / ranks) - shard)
    return {"stage2": dict(zip(STATES, whole, strict=True)), "stage3": dict(zip(STATES, sharded, strict=True))}


def deepspeed_offload(
    parameters: int, ranks: int, largest_layer: int = 0, ranks_per_node: int = 8
) -> dict[str, dict[str, int]]:
    """Return DeepSpeed's estimates for states on the host: {"stage2 offload_optimizer": {"device":, "host":}, ...}.

    device: bytes of a rank. host: bytes of a node, with a factor of 1.5 for buffers. "zero_init" is a model that is
    built in shards.
    """
    # Ranks of one node share the memory of its host.
    near = min(ranks, ranks_per_node)
    nodes = -(-ranks // near)
    p, layer = parameters, largest_layer
    return {
        "stage2 offload_optimizer": {"device": 2 * p, "host": int(p * max(4 * near, 16) * 1.5)},
        "stage3 offload_optimizer": {
            "device": 4 * layer + 2 * p // ranks,
            "host": int(p * max(4 * near, 16 / nodes) * 1.5),
        },
        "stage3 offload_optimizer zero_init": {"device": 4 * layer + 2 * p // ranks, "host": int(p * 16 / nodes * 1.5)},
        "stage3 offload_optimizer offload_param": {
            "device": 4 * layer,
            "host": int(p * max(4 * near, 18 / nodes) * 1.5),
        },
        "stage3 offload_optimizer offload_param zero_init": {"device": 4 * layer, "host": int(p * 18 / nodes * 1.5)},
    }


def layout_stages(job: Job, layout: ClusterLayout, accounting: str = "megatron") -> dict[str, RankMemory]:
    """Return {"stage0": memory, ...} of the fullest pipeline rank: `minidist plan`'s, to the byte.

    With `deepspeed` the states are its estimates of the whole model, and what stage 3 gathers is left out, because they
    include the largest layer. Errors: UsageError for a layout that is not possible.
    """
    check_accounting(accounting)
    if accounting != "deepspeed":
        job = replace(job, accounting=accounting)
    stages: dict[str, RankMemory] = {}
    for zero in range(4):
        at_stage = replace(layout, zero=zero)
        check_layout(at_stage, job)
        stages[f"stage{zero}"] = max(memory_by_rank(at_stage, job), key=lambda rank: rank.likely(job))
    if accounting != "deepspeed":
        return stages
    estimates = _deepspeed_states(job.model.parameters, layout.dp, job.model.largest_module)
    gathered = ("gathered", "prefetch", "reducing")
    return {
        stage: replace(
            stages[stage],
            by_kind={**{kind: n for kind, n in stages[stage].by_kind.items() if kind not in gathered}, **states},
        )
        for stage, states in estimates.items()
    }


def block_forms(job: Job, batch: int) -> dict[str, int] | None:
    """Return the two closed forms of a GPT block's activations, of the paper and of minidist; None for other blocks."""
    model = job.model
    if model.gated or model.inner != 4 * model.width:
        return None
    sizes = (job.length, batch, model.width, model.heads)
    return {"unfused": unfused(*sizes), "fused": fused(*sizes, itemsize=2, dropout=True)}


def block_sentence(block: dict[str, int]) -> str:
    """Return the two closed forms of a block's activations, as one sentence."""
    return (
        f"with dropout, an unfused block keeps 34 s b h + 5 a s^2 b = {block['unfused'] / 1e6:,.2f} MB (Korthikanti et"
        f" al., 2022), and minidist's, in 2-byte values, {block['fused'] / 1e6:,.2f} MB: 34 s b h + 8 s b + about"
        " 2 a s^2 b"
    )


def whole_number(text: str) -> int:
    """Convert 7.5e9, or 7.5B, to 7500000000; UsageError when it is not a whole number above 0."""
    exponent = {"M": 6, "B": 9, "T": 12}.get(text[-1:].upper())
    try:
        value = Decimal(text if exponent is None else f"{text[:-1]}e{exponent}")
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or not 1 <= value < Decimal("1e30") or value != int(value):
        raise UsageError(
            f"--params {quoted(text, marks=False)} is not a number of parameters; give a whole number such as 7.5e9,"
            " 7.5B or 124439808"
        )
    return int(value)


def table(stages: dict[str, Any]) -> str:
    """Format the stages for people, in GB of 1e9 bytes."""
    rows = {stage: parts for stage, parts in stages.items() if stage.startswith("stage")}
    names = list(dict.fromkeys(key for parts in rows.values() for key in parts if key != "total")) + ["total"]
    lines = [f"{'GB (1e9 B) a rank':18}" + "".join(f"{stage:>12}" for stage in rows)]
    for name in names:
        lines.append(
            f"  {name:16}"
            + "".join(f"{parts[name] / 1e9:12.2f}" if name in parts else f"{'-':>12}" for parts in rows.values())
        )
    return "\n".join(lines)


def offload_table(rows: dict[str, dict[str, int]]) -> str:
    """Format `deepspeed_offload` for people."""
    lines = [f"{'with states on the host, GB':52}{'a rank':>10}{'a node':>10}"]
    return "\n".join(
        [*lines, *(f"  {name:50}{row['device'] / 1e9:10.2f}{row['host'] / 1e9:10.2f}" for name, row in rows.items())]
    )
