"""What `minidist plan` prints for people: the layouts that fit, the memory and the step of the best one, and formulas.

Proved by: tests/commands/test_plan.py
"""

from collections import Counter
from collections.abc import Sequence

from minidist.planning.cluster.layout import Job
from minidist.planning.cluster.memory import in_flight
from minidist.planning.cluster.search import Plan, Search


def layouts_table(plans: Sequence[Plan]) -> str:
    """Format layouts, one per line, with the range of the step and of the peak."""
    lines = [f"{'step':>22}  {'peak of a GPU':>15}  {'tokens/s':>10}  {'MFU':>5}  layout"]
    for plan in plans:
        short, long = (share * plan.time.seconds for share in plan.time_range)
        low, high = (share * plan.fullest.peak / 1e9 for share in plan.calibration.memory_range)
        lines.append(
            f"{short:8.3g} to {long:8.3g} s  {_gigabytes(low)} to {_gigabytes(high)} GB "
            f" {plan.tokens_per_second:10,.0f}  {100 * plan.utilization(plan.model_flops):4.1f}%  {plan.layout}"
        )
    return "\n".join(lines)


def _gigabytes(number: float) -> str:
    """Format GB in four columns, with digits behind the point where there are few."""
    return f"{number:4.0f}" if number >= 10 else f"{number:4.2f}"


def best_table(plan: Plan) -> str:
    """Format the memory of the fullest rank by kind, and the parts of a step."""
    kinds = ", ".join(f"{kind} {nbytes / 1e9:.1f}" for kind, nbytes in plan.fullest.by_kind.items() if nbytes > 5e7)
    time = plan.time
    idle = time.bubble * time.seconds
    messages = "".join(f", {axis} messages {seconds:.3g}" for axis, seconds in time.exposed.items())
    return (
        f"memory of the fullest rank, GB: {kinds}; free {(plan.machine.memory - plan.needed) / 1e9:.1f}\n"
        f"a step, s: computing {time.compute:.3g}{messages}, bubble {idle:.3g}"
    )


def refused_table(search: Search, most: int = 3) -> str:
    """Format how many layouts do not fit or are impossible, with examples."""
    if not search.refused:
        return ""
    impossible = Counter(reason for _, reason in search.impossible)
    lines = [
        f"{len(search.too_large):,} layouts do not fit, {len(search.impossible):,} are impossible; for example",
        *(f"  {plan.layout}: {plan.shortage}" for plan in search.too_large[:most]),
    ]
    lines += [f"  {count:,} x {reason}" for reason, count in impossible.most_common(most)]
    return "\n".join(lines)


def explanation(plan: Plan) -> str:
    """Return the formulas of memory and time with the numbers of one layout."""
    job, e, model, c = plan.job, plan.layout, plan.job.model, plan.calibration
    fullest = plan.memory.index(plan.fullest)
    time = plan.time
    lines = [
        f"parameters: {model.parameters:,}, of which a token uses {model.active_parameters:,}",
        f"model FLOPs of a step: 3 x {job.global_batch:,} sequences x {job.length:,} tokens x"
        f" {model.forward_flops(job.length):,} = {plan.model_flops:.4g}",
        f"pipeline rank {fullest} of {e.pp} is the fullest; it keeps {in_flight(e, fullest):g} micro-batches of its"
        " layers",
        "states: 2 bytes per parameter, 4 per gradient, 12 of the optimizer"
        + (f"; ZeRO {e.zero} divides by dp x cp = {e.sharding_ranks}" if e.zero else ""),
        "activations per layer and micro-batch: 2-byte values, (8 s b h outside of the split products + queries, keys,"
        " values, outputs, and the MLP's) / tp (Korthikanti et al., 2022, equations 1 to 6)",
        f"a step = (computing {time.compute:.3g} s + messages {sum(time.exposed.values()):.3g} s) / (1 - bubble"
        f" {time.bubble:.3f}) = {time.seconds:.3g} s",
        f"bubble = (p - 1) / v / (m + (p - 1) / v), p = {e.pp}, v = {e.vp}, m = {e.microbatches}",
        f"products reach {c.product_efficiency[plan.machine.family]:.0%} of"
        f" {plan.machine.peak(job.precision) / 1e12:,.0f} TFLOP/s, attention"
        f" {c.attention_efficiency[plan.machine.family]:.0%} (fitted; docs/planner.md)",
        "an all-reduce of n bytes over r ranks takes 2 (r - 1) / r n / bandwidth, and a latency per step of the ring",
        *_expert_lines(plan),
        f"MFU = model FLOPs / (step x {job.gpus:,} GPUs x peak) = {plan.utilization(plan.model_flops):.4f}; with what"
        f" is computed again HFU = {plan.utilization(plan.hardware_flops):.4f}",
    ]
    return "\n".join(lines)


def _expert_lines(plan: Plan) -> list[str]:
    """Return the formulas of a model with experts: none for another one."""
    model, e, c = plan.job.model, plan.layout, plan.calibration
    if not model.experts:
        return []
    lines = [
        f"a layer with experts permutes the {model.top_k} copies of its tokens: {c.permutation_passes:g} times they are"
        f" read or written; its kernels take the host {1e3 * c.sparse_launch_seconds:g} ms to launch, those of another"
        f" layer {1e3 * c.launch_seconds:g} ms"
    ]
    if e.ep > 1:
        near = max(1, min(e.ep, plan.machine.gpus_per_node // e.expert_tp))
        lines.append(
            f"an exchange over ep {e.ep}, {near} of them in a node: a token goes once to each other node with one of"
            f" its experts, through the adapter of its GPU; four exchanges per layer and micro-batch"
        )
    return lines


def header(job: Job, plan_count: int, machine: str) -> str:
    """Return the first line."""
    count = job.model.parameters
    parameters = f"{count / 1e9:,.2f}e9" if count >= 10_000_000 else f"{count:,}"
    return (
        f"{parameters} parameters on {job.gpus:,} x {machine}, {job.global_batch:,} sequences of"
        f" {job.length:,} tokens, {job.precision}: {plan_count:,} layouts fit"
    )
