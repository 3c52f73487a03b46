"""What `minidist plan` prints for people: the layouts that fit, the memory and the step of the best one, and formulas.

Proved by: tests/commands/test_plan.py
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from minidist.base.errors import counted
from minidist.planning.cluster.calibration import CALIBRATION
from minidist.planning.cluster.layout import Job, stage_layers
from minidist.planning.cluster.memory import in_flight, rank_parameters
from minidist.planning.cluster.search import Plan, Search
from minidist.planning.cluster.step_time import StepModel

MOST_FASTER = 3  # rows of layouts that may not fit


def layouts_table(plans: Sequence[Plan], best: int) -> str:
    """Format the first layouts, one per line, with the ranges of the step, the peak and the speed.

    plans: all that fit, first those that surely do. Of the others, those that would be faster follow.
    """
    sure = [plan for plan in plans if plan.fit.verdict == "yes"]
    perhaps = [plan for plan in plans if plan.fit.verdict != "yes"]
    rows = (sure or perhaps)[:best]
    lines = [f"{'step':>22}  {'peak of a GPU':>15}  {'fits':7}  {'tokens/s':>24}  {'MFU':>12}  layout"]
    lines += [_row(plan) for plan in rows]
    faster = [plan for plan in perhaps if plan.time.seconds < sure[0].time.seconds] if sure else []
    if faster:
        lines.append("faster if memory is at the low end of its range:")
        lines += [_row(plan) for plan in faster[: min(best, MOST_FASTER)]]
    close = equally_fast(rows)
    if close > 1:
        lines.append(f"Rows 1 to {close} are equal within the error: the ranges of their steps overlap.")
    if len(rows) > 1:
        lines.append("Layouts are sorted by step time, with a penalty of 1 % per kind of parallelism.")
    return "\n".join(lines)


def equally_fast(plans: Sequence[Plan]) -> int:
    """Return how many of the first layouts have a range of the step's seconds that overlaps with that of the first."""
    slow = plans[0].seconds_range[1]
    return sum(1 for _ in takewhile(lambda plan: plan.seconds_range[0] <= slow, plans))


def _row(plan: Plan) -> str:
    """Format one layout."""
    short, long = plan.seconds_range
    low, high = ((bound - CALIBRATION.reserved_bytes) / 1e9 for bound in (plan.fit.low, plan.fit.high))
    slow, fast = (plan.tokens_per_second * plan.time.seconds / seconds for seconds in (long, short))
    mfu = plan.utilization(plan.model_flops) * plan.time.seconds
    return (
        f"{short:8.3g} to {long:8.3g} s  {_gigabytes(low)} to {_gigabytes(high)} GB  {plan.fit.verdict:7} "
        f" {slow:10,.0f} to {fast:10,.0f}  {100 * mfu / long:4.1f} to {100 * mfu / short:4.1f}%  {plan.layout}"
    )


def cost_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what the whole run of the first layout takes, where its tokens are given. result: what --json prints."""
    parts = [
        f"{result[name]['low']:,.{digits}f} to {result[name]['high']:,.{digits}f} {words}"
        for name, words, digits in (("days", "days", 1), ("gpu_hours", "GPU hours", 0), ("cost", "of cost", 0))
        if name in result
    ]
    return [f"the whole run with the first: {', '.join(parts)}"] if parts else []


def _gigabytes(number: float) -> str:
    """Format GB in four columns, with two decimals below 10."""
    return f"{number:4.0f}" if number >= 10 else f"{number:4.2f}"


def best_table(plan: Plan) -> str:
    """Format the memory of the fullest rank by kind, and the parts of a step."""
    kinds = ", ".join(f"{kind} {nbytes / 1e9:.1f}" for kind, nbytes in plan.fullest.by_kind.items() if nbytes > 5e7)
    time = plan.time
    idle = time.bubble * time.seconds
    names = {"host": f"waiting for the host ({plan.waiting:.1%} of the step)"}
    messages = "".join(
        f", {names.get(axis, f'{axis} messages')} {seconds:.3g}" for axis, seconds in time.exposed.items()
    )
    return (
        f"memory of the fullest rank, GB (central estimate): {kinds}; {plan.fit.room}\n"
        f"a step, s (central estimate): computing {time.compute:.3g}{messages}, bubble {idle:.3g}"
    )


def refused_table(search: Search, most: int = 3) -> str:
    """Format how many layouts do not fit or are impossible, with examples: those that need least."""
    if not (search.too_large or search.impossible):
        return ""
    impossible = Counter(reason for _, reason in search.impossible)
    large, others = len(search.too_large), len(search.impossible)
    lines = [
        f"{counted(large, 'layout')} {'does' if large == 1 else 'do'} not fit,"
        f" {others:,} {'is' if others == 1 else 'are'} impossible; for example",
        *(f"  {plan.layout}: {plan.shortage}" for plan in search.too_large[:most]),
    ]
    lines += [f"  {count:,} x {reason}" for reason, count in impossible.most_common(most)]
    return "\n".join(lines)


def explanation(plan: Plan) -> list[str]:
    """Return the formulas of memory and time with the numbers of one layout, one per line."""
    job, model, c = plan.job, plan.job.model, CALIBRATION
    time = plan.time
    return [
        f"parameters: {model.counted_parameters:,}; a token uses {model.active_parameters:,}",
        f"model FLOPs of a step: 3 x {job.global_batch:,} sequences x {job.length:,} tokens x"
        f" {model.forward_flops(job.length):,} = {plan.model_flops:.4g}",
        *_memory_lines(plan),
        f"a step = (computing {time.compute:.5g} s + messages {sum(time.exposed.values()):.5g} s) / (1 - bubble"
        f" {time.bubble:.5f}) = {time.seconds:.5g} s",
        *_bubble_lines(plan),
        f"products reach {StepModel(plan.layout, job, plan.machine).product_efficiency:.0%} of"
        f" {plan.machine.peak(job.precision) / 1e12:,.0f} TFLOP/s, attention"
        f" {c.attention_efficiency[plan.machine.family]:.0%} (fitted; docs/planner.md)",
        *_message_lines(plan),
        *_expert_lines(plan),
        f"MFU = model FLOPs / (step x {job.gpus:,} GPUs x peak) = {plan.utilization(plan.model_flops):.4f}; with what"
        f" is computed again HFU = {plan.utilization(plan.hardware_flops):.4f}",
    ]


def _memory_lines(plan: Plan) -> list[str]:
    """Return the memory of the fullest rank by kind, each with the numbers that it is a product of."""
    job, e, c, rank = plan.job, plan.layout, CALIBRATION, plan.fullest_rank
    own = rank_parameters(e, job, rank, stage_layers(e, job.model.layers)[rank])
    kinds = plan.fullest.by_kind
    tokens = e.micro_batch * job.length // e.cp
    kept = in_flight(e, rank)
    words = {
        "activations": f"{kept:g} micro-batch{'es' * (kept != 1)} in flight x {kinds['activations'] / kept:.5g} B, what"
        " the rank keeps of one (Korthikanti et al., 2022, equations 1 to 6)",
        "logits": f"{c.logit_bytes:g} B x {tokens:,} tokens x {job.model.vocabulary:,} words / tp {e.tp}",
        "workspace": "of the block that is computed",
        "gathered": "a block, and the parameters outside of blocks",
        "prefetch": "the blocks that are gathered ahead",
        "reducing": "the float32 gradients of a block",
        "constant": "fitted",
    }
    lines = [f"pipeline rank {rank} of {e.pp} is the fullest; it has {own.total:,} parameters"]
    for kind, nbytes in kinds.items():
        if kind in ("parameters", "gradients", "optimizer"):
            divides = e.zero >= {"optimizer": 1, "gradients": 2, "parameters": 3}[kind]
            ranks = e.sharding_ranks if divides and not own.expert else 1
            words[kind] = f"{nbytes * ranks / own.total:.5g} B x {own.total:,} parameters"
            words[kind] += f" / {ranks} ranks (ZeRO {e.zero}, dp x cp)" if ranks > 1 else ""
            words[kind] += f" with the share of a rank under ZeRO {e.zero}" if divides and own.expert else ""
        if nbytes:
            lines.append(f"  {kind} {nbytes / 1e9:.5g} GB: {words.get(kind, 'counted')}")
    return lines


def _bubble_lines(plan: Plan) -> list[str]:
    """Return the formula of the bubble; none without a pipeline."""
    e, time = plan.layout, plan.time
    if e.pp == 1:
        return []
    idle = time.bubble * time.seconds
    return [
        f"bubble = passes of one micro-batch through the other {counted(e.pp - 1, 'rank')} / {counted(e.vp, 'chunk')} /"
        f" step = {idle * e.vp:.5g} s / {e.vp} / {time.seconds:.5g} s = {time.bubble:.5f}"
    ]


def _message_lines(plan: Plan) -> list[str]:
    """Return the formula of each axis's messages: how many there are, and how long one takes."""
    e, job, exposed = plan.layout, plan.job, plan.time.exposed
    step, lines = StepModel(e, job, plan.machine), []
    names = {"tp": "all-reduces", "cp": "rings of keys and values"}
    for axis, (count, ring) in step.rings().items():
        one = step.ring_seconds(*ring)
        lines.append(_product(axis, exposed[axis], e.microbatches, count, names[axis], one) + _ring(step, *ring))
    if "ep" in exposed:
        count, nbytes = step.exchanges()
        one = step.exchange_seconds(nbytes)
        product = _product("ep", exposed["ep"], e.microbatches, count, "exchanges", one)
        lines.append(f"{product}; an exchange is of {nbytes:.5g} B")
    if "pp" in exposed:
        one = exposed["pp"] / e.microbatches / (2 * e.vp)
        lines.append(
            f"pp messages = {e.microbatches} micro-batches x 2 directions x {e.vp} chunks x {one:.5g} s ="
            f" {exposed['pp']:.5g} s; one is of {2 * e.micro_batch * job.length / e.cp * job.model.width / e.tp:.5g} B"
        )
    if "dp" in exposed:
        lines.append(_data_line(plan))
    return lines


def _product(axis: str, seconds: float, microbatches: int, count: int, what: str, one: float) -> str:
    """Return the seconds of an axis's messages as a product."""
    layers = round(seconds / (microbatches * count * one))
    return (
        f"{axis} messages = {microbatches} micro-batches x {counted(layers, 'layer')} x {count} {what} x {one:.5g} s ="
        f" {seconds:.5g} s"
    )


def _ring(step: StepModel, nbytes: float, ranks: int, stride: int, passes: int) -> str:
    """Return how the seconds of a ring follow from its bytes."""
    seconds = step.ring_seconds(nbytes, ranks, stride, passes)
    latency = step.ring_seconds(0, ranks, stride, passes)
    bandwidth = passes * (ranks - 1) / ranks * nbytes / (seconds - latency)
    return (
        f"; one takes {passes} x ({ranks} - 1) / {ranks} x {nbytes:.5g} B / {bandwidth:.5g} B/s + latencies of"
        f" {latency:.5g} s = {seconds:.5g} s"
    )


def _data_line(plan: Plan) -> str:
    """Return the formula of the messages that gradients and ZeRO need."""
    e, c, seconds = plan.layout, CALIBRATION, plan.time.exposed["dp"]
    if e.zero == 3:
        return (
            f"dp messages = what computing does not hide of {e.microbatches} micro-batches x 3 rings (parameters are"
            f" gathered twice, and gradients reduced) = {seconds:.5g} s"
        )
    rings = (e.microbatches if e.zero == 2 else 1) + 1
    one = seconds / c.gradients_exposed / rings
    return (
        f"dp messages = {c.gradients_exposed:g} (the share that computing does not hide) x {rings} rings x {one:.5g} s"
        f" = {seconds:.5g} s; a ring is of the 2-byte gradients or parameters of a rank, over dp x cp ="
        f" {e.sharding_ranks} ranks"
    )


def _expert_lines(plan: Plan) -> list[str]:
    """Return the formulas of a model with experts: none for another one."""
    model, e, c = plan.job.model, plan.layout, CALIBRATION
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


def title(job: Job, cluster: str = "") -> str:
    """Return what is trained. cluster: on what."""
    count = job.model.counted_parameters
    parameters = f"{count / 1e9:,.2f}e9" if count >= 10_000_000 else f"{count:,}"
    return (
        f"{parameters} parameters{cluster}, {counted(job.global_batch, 'sequence')} of {counted(job.length, 'token')},"
        f" {job.precision}"
    )


def header(job: Job, plans: Sequence[Plan], machine: str) -> str:
    """Return the first line. plans: the layouts that fit."""
    first = (
        f"{title(job, f' on {job.gpus:,} x {machine}')}: {counted(len(plans), 'layout')} fit{'s' * (len(plans) == 1)}"
    )
    if not plans:
        return first
    host = plans[0].layout.host != "none"
    sure = sum(plan.fit.verdict == "yes" for plan in plans)
    return first + ", with a part of the memory on the host" * host + f", {sure:,} of them surely" * (sure < len(plans))


def advice(search: Search, remedies: Sequence[str], gpus: int) -> str:
    """Return what to do when no layout fits."""
    start = f"no layout of {counted(gpus, 'GPU')} fits: with the smallest, {search.too_large[0].shortage}"
    return f"{start}; something fits with {', or '.join(remedies)}" if remedies else f"{start}; train a smaller model"
