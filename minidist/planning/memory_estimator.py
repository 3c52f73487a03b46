"""How many bytes a rank holds, on paper: before a job is started, and for models that do not fit on a laptop.

Mixed-precision Adam holds 16 bytes per parameter: 2 for the value, 2 for the gradient, 12 for the optimizer (a float32
copy and two moments). ZeRO divides them by the number of ranks, one kind after the other:

    stage 0    2 P + 2 P + 12 P          stage 2    2 P + (2 P + 12 P) / N
    stage 1    2 P + 2 P + 12 P / N      stage 3    (2 P + 2 P + 12 P) / N

Sources count differently, so every table names its accounting:

    zero                the paper's, above (Rajbhandari et al., SC 2020, section 3.1 and figure 1)
    fp32-accumulation   gradients are added in float32 beside the 2-byte ones: 6 bytes (Ultra-Scale Playbook: 20 P)
    deepspeed           the estimators in DeepSpeed's documentation: stage 2 4 P + 16 P / N, stage 3 4 L + 18 P / N,
                        with L the parameters of the largest layer, the single module with most parameters of its own
                        (an embedding or a linear layer, not a block); float32 gradients count as optimizer state

For a model it adds what else a step needs: activations (Korthikanti et al., 2022, table 2: 2-byte values, 1-byte
masks), logits, and for stage 3 the units that are gathered at one time, as `fully_shard` holds them.

Proved by: tests/planning/test_memory_estimator.py
"""

from decimal import Decimal, InvalidOperation
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import check_count
from minidist.nn.segments import sqrt_segments
from minidist.planning.architecture import Architecture
from minidist.planning.block_bytes import fused, unfused
from minidist.planning.huggingface_config import read_model

ACCOUNTINGS = ("zero", "fp32-accumulation", "deepspeed")
NOT_COUNTED = (
    "not counted: what an allocator adds and this cannot know: fragmentation, caches of freed blocks, the device's"
    " context, workspaces of the BLAS, buffers of the communication library; leave room for them"
)
# Kind of state -> bytes of one rank.
Stage = dict[str, int]


def model_states(parameters: int, ranks: int, accounting: str = "zero", largest_layer: int = 0) -> dict[str, Stage]:
    """Return {"stage0": {"parameters": bytes, "gradients":, "optimizer":, "total":}, ...} of one of `ranks` ranks.

    A shard is rounded up to whole elements. largest_layer: its parameters (`Architecture.largest_module`), for
    `deepspeed`, which has no estimator for stages 0 and 1. Errors: UsageError for counts below 1 and for an unknown
    accounting.
    """
    if parameters < 1 or ranks < 1:
        raise UsageError(f"{quoted(parameters)} parameters on {quoted(ranks)} ranks; both must be at least 1")
    check_count(ranks, "--dp")
    if accounting not in ACCOUNTINGS:
        raise UsageError(
            f"there is no accounting {quoted(accounting)}{nearest(accounting, ACCOUNTINGS)}; there are"
            f" {', '.join(ACCOUNTINGS)}"
        )

    # Every stage from 1 on divides one more kind of state by the ranks: optimizer, gradients, parameters.
    shard = -(-parameters // ranks)
    if accounting == "deepspeed":
        return {
            "stage2": _stage(2 * parameters, 2 * parameters, int(16 * parameters / ranks)),
            "stage3": _stage(
                2 * largest_layer + int(2 * parameters / ranks),
                2 * largest_layer,
                int(18 * parameters / ranks) - int(2 * parameters / ranks),
            ),
        }

    # The two other accountings differ in the gradient: 2 bytes, or these and a float32 sum.
    gradient = 2 if accounting == "zero" else 6
    return {
        f"stage{stage}": _stage(
            2 * (shard if stage >= 3 else parameters),
            gradient * (shard if stage >= 2 else parameters),
            12 * (shard if stage >= 1 else parameters),
        )
        for stage in range(4)
    }


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


def offload_table(rows: dict[str, dict[str, int]]) -> str:
    """Format `deepspeed_offload` for people."""
    lines = [f"{'with states on the host, GB':52}{'a rank':>10}{'a node':>10}"]
    return "\n".join(
        [*lines, *(f"  {name:50}{row['device'] / 1e9:10.2f}{row['host'] / 1e9:10.2f}" for name, row in rows.items())]
    )


def _stage(parameters: int, gradients: int, optimizer: int) -> Stage:
    return {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "total": parameters + gradients + optimizer,
    }


def block_activations(model: Architecture, batch: int, length: int, recompute: str, layer: int = 0) -> int:
    """Return the bytes that the block of a layer keeps; `recompute`: none, selective (attention's core) or full."""
    s, b, h, a = length, batch, model.width, model.heads
    if recompute == "full":
        # Only the input of the block.
        return 2 * s * b * h
    if not model.gated:
        # Without its core, attention keeps no scores: those are the terms in a.
        # The paper's MLP has 4 h elements inside, and keeps two bytes of the input and of the output of GELU.
        return unfused(s, b, h, a if recompute == "none" else 0) + 4 * s * b * (model.inner - 4 * h)
    attention = 2 * (model.query_size + 2 * model.kv_size + model.value_size)
    if model.latent:
        attention += 2 * (model.latent.kv_rank + (model.latent.q_rank or 0))
    mlp = 8 * model.inner
    if model.is_sparse(layer):
        # Each expert of a token has its own copy of the input; the router keeps a float32 score per expert.
        copies = model.top_k + model.shared_experts
        mlp = 8 * copies * (model.expert_inner or model.inner) + 2 * h * model.top_k + 4 * model.experts
    linear = s * b * (8 * h + attention + mlp)
    scores = 2 * a * s * s * b  # the softmax; there is no dropout
    return linear + (scores if recompute == "none" else 0)


def _model_activations(model: Architecture, batch: int, length: int, recompute: str) -> int:
    """Return what every block (or segment) keeps, and what the one that is recomputed needs at a time."""
    kinds = model.of_a_kind(range(model.layers))
    whole = max(block_activations(model, batch, length, "none", layer) for layer, _ in kinds)
    if recompute == "sqrt":
        segments = sqrt_segments(model.layers)
        return len(segments) * block_activations(model, batch, length, "full") + segments[0] * whole
    kept = sum(n * block_activations(model, batch, length, recompute, layer) for layer, n in kinds)
    return kept + (whole if recompute == "full" else 0)


def model_peak(
    name: str,
    ranks: int,
    batch: int = 1,
    length: int | None = None,
    accounting: str = "zero",
    recompute: str = "none",
    prefetch: int = 1,
) -> dict[str, Any]:
    """Return the full peak of a step with `batch` sequences per rank: {"model", "parameters", "stage0", ...}.

    Beside the model states each stage has: activations (of all blocks; with full recomputation their inputs and one
    whole block, with sqrt the segments' inputs and one whole segment), logits (float32, and the inputs of the output
    projection and of the last norm), gathered (stage 3: the model outside the blocks, and one block), prefetch (stage
    3), reducing (stage 3: 2-byte gradients of the rest, of a block, and of one in flight). "total" is the sum, so an
    upper bound: the parts need not occur at one moment. With the accounting deepspeed also `offload`.
    """
    if recompute not in ("none", "selective", "full", "sqrt"):
        raise UsageError(f"--recompute {quoted(recompute)}; it must be none, selective, full or sqrt")
    model = read_model(name)
    length = model.positions if length is None else length
    check_count(batch, "--batch", 1)
    check_count(prefetch, "--prefetch")
    check_count(length, f"--seq for {quoted(name, marks=False)}", 1, model.positions)

    # Layers with experts and without differ, so what exists of one block at a time is that of the largest.
    block = max(model.block_at(layer).total for layer, _ in model.of_a_kind(range(model.layers)))
    activations = _model_activations(model, batch, length, recompute)

    # Logits in float32; the inputs of the head and of the last norm in 2 bytes.
    logits = batch * length * (4 * model.vocabulary + 4 * model.width)
    result: dict[str, Any] = {"model": name, "parameters": model.parameters}
    if not model.gated and model.inner == 4 * model.width:
        sizes = (length, batch, model.width, model.heads)
        result["activations_of_a_block"] = {
            "unfused": unfused(*sizes),
            "fused": fused(*sizes, itemsize=2, dropout=True),
        }

    # Each stage: the model states of its accounting, and what ZeRO 3 gathers.
    for stage, states in model_states(model.parameters, ranks, accounting, model.largest_module).items():
        parts = {key: value for key, value in states.items() if key != "total"}
        parts |= {"activations": activations, "logits": logits}
        # DeepSpeed's estimator includes the largest layer.
        if stage == "stage3" and accounting != "deepspeed":
            parts["gathered"] = 2 * (model.rest + block)
            parts["prefetch"] = 2 * min(prefetch, model.layers - 1) * block
            parts["reducing"] = 2 * (model.rest + 2 * block)
        result[stage] = {**parts, "total": sum(parts.values())}
    if accounting == "deepspeed":
        result["offload"] = deepspeed_offload(model.parameters, ranks, model.largest_module)
    return {**result, "not_counted": NOT_COUNTED}


def block_sentence(stages: dict[str, Any]) -> str:
    """Return the two closed forms of a block's activations, as one sentence."""
    block = stages["activations_of_a_block"]
    return (
        f"one block keeps 34 s b h + 5 a s^2 b = {block['unfused'] / 1e6:,.2f} MB (counted above); fused as minidist's,"
        f" in 2-byte values, {block['fused'] / 1e6:,.2f} MB: 34 s b h + 8 s b + about 2 a s^2 b"
    )


def whole_number(text: str) -> int:
    """Convert 7.5e9 to 7500000000; UsageError when it is not a whole number above 0."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or not 1 <= value < Decimal("1e30") or value != int(value):
        raise UsageError(
            f"--params {quoted(text, marks=False)} is not a number of parameters; give a whole number such as 7.5e9 or"
            " 124439808"
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
