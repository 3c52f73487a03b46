"""Commands that try a planned layout with minidist itself: a dry run of its size, and a small copy that is compared.

The planner's numbers are formulas; the two commands run the layout:

    dry run    minidist train ... --dry-run: the whole program with these degrees on arrays without data, which gives
               the exact bytes and the peaks of minidist's own blocks, on the plan's machine
    compare    minidist compare ...: the same axes with two ranks each on a model of a few thousand parameters, which
               trains and is compared with one device, value by value

Both train minidist's own GPT or Llama, the dry run with random tokens of the model's vocabulary. `differences` lists
how the dry run differs from the plan.

Proved by: tests/planning/test_ready_commands.py
"""

import shlex
from dataclasses import replace
from typing import Any

from minidist.planning.cluster.layout import ClusterLayout, Job

MAX_TOP_K = 2  # experts per token that minidist trains with
PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
STEPS = 2  # the optimizer's states exist from the first step's end on, next to activations in the second one


def dry_run_command(layout: ClusterLayout, job: Job, gpu: str) -> str:
    """Return the command that runs two steps of the layout without data. gpu: a machine's name or its file."""
    model = job.model
    sizes = {"layers": model.layers, "width": model.width, "heads": model.heads, "context": job.length}
    if model.gated:
        sizes["ffn"] = model.expert_inner or model.inner
    if model.gated and (model.kv_heads or model.heads) != model.heads:
        sizes["kv-heads"] = model.kv_heads or model.heads
    if model.experts:
        sizes |= {"experts": model.experts, "top-k": min(model.top_k, MAX_TOP_K)}
    flags = f"--data random:{model.vocabulary} " + _flags(
        replace(layout, recompute=_recompute(layout, job)), job, sizes
    )

    # The planner's experts are equally busy, so no slots stay empty; its GPT keeps masks.
    if model.experts:
        flags += " --capacity-factor 1"
    if job.has_dropout and not model.gated:
        flags += " --dropout 0.1"
    # All ranks of a stage do the same in every layout that is planned, so one of them stands for all.
    fold = " --fold" * (layout.ranks > layout.pp)
    machine = f"--gpu {shlex.quote(gpu)}"
    return f"minidist train {flags} --precision {PRECISIONS[job.precision]} --steps {STEPS} {machine} --dry-run{fold}"


def _stores_scores(layout: ClusterLayout) -> bool:
    """Return whether minidist's attention keeps its scores, in a forward pass that is not repeated."""
    return layout.cp == 1  # ring attention computes them again


def _recompute(layout: ClusterLayout, job: Job) -> str:
    """Return the recomputation of the dry run that is closest to the plan's."""
    # Fused kernels keep no scores. minidist's attention keeps none where it is computed again.
    if layout.recompute == "none" and job.fused_attention and _stores_scores(layout):
        return "selective"
    return layout.recompute


def compare_command(layout: ClusterLayout, job: Job) -> str:
    """Return the command that trains a small copy of the layout, at most two ranks per axis, next to one device."""
    small = replace(
        layout,
        dp=min(layout.dp, 2) if layout.ep == 1 else 2,
        tp=min(layout.tp, 2),
        pp=min(layout.pp, 2),
        cp=min(layout.cp, 2),
        ep=min(layout.ep, 2),
        vp=min(layout.vp, 2),
        micro_batch=1,
        microbatches=2 * min(layout.pp, 2) if layout.pp > 1 else min(layout.microbatches, 2),
    )
    sizes = {"layers": 2 * small.pp * small.vp, "width": 32, "heads": 4, "context": 16}
    if job.model.gated and (job.model.kv_heads or job.model.heads) != job.model.heads:
        sizes["kv-heads"] = 2
    if job.model.experts:
        sizes |= {"experts": 4, "top-k": min(job.model.top_k, MAX_TOP_K)}
    return f"minidist compare {_flags(small, job, sizes)} --precision fp64 --steps 2"


def differences(layout: ClusterLayout, job: Job) -> list[str]:
    """Return the differences between the dry run and the plan: first the model, then how its blocks compute."""
    model, parts = job.model, list[str]()
    inner = model.expert_inner or model.inner
    for ours, theirs, what in (
        (inner if model.gated else 4 * model.width, inner, "an inner size"),
        (min(model.top_k, MAX_TOP_K), model.top_k, "experts per token"),
        (0, model.shared_experts, "shared experts"),
        (0, model.dense_layers, "layers without experts"),
        (model.width // model.heads, model.query_size // model.heads, "a head size"),
    ):
        if ours != theirs:
            parts.append(f"{what} {ours:,} instead of {theirs:,}")
    projection = "an untied output projection" if model.gated else "an output projection that is the embedding"
    divided = f"experts divided among all {layout.tp} tensor-parallel ranks instead of {layout.expert_tp}"
    parts += _that_hold(
        (model.latent, "attention without latent projections"),
        (model.experts and layout.expert_tp != layout.tp, divided),
        (model.is_tied == model.gated, projection),
        (job.precision not in ("fp16", "bf16"), f"bf16 instead of {job.precision}"),
        (model.gated and job.has_dropout, "no masks of dropout"),
    )
    return parts + _score_differences(layout, job) + _other_differences(layout, job)


def _that_hold(*differences: tuple[Any, str]) -> list[str]:
    """Return the differences whose condition is true."""
    return [difference for holds, difference in differences if holds]


def _score_differences(layout: ClusterLayout, job: Job) -> list[str]:
    """Return which assumptions of memory.py about attention's scores the blocks of minidist do not meet."""
    model, parts = job.model, []
    scores = layout.micro_batch * job.length**2 * model.heads // layout.tp  # 2 bytes for half of the pairs
    of_a_layer = f"the scores of one layer at a time ({scores / 1e9:.2g} GB)"
    if not _stores_scores(layout):
        parts += [] if job.fused_attention else ["ring attention, which stores no scores"]
    elif not job.fused_attention:
        parts += ["half of the scores, because the others are masked"] if layout.recompute == "none" else []
    elif layout.recompute == "full" and layout.pp > 1:
        parts.append(
            "recomputation of a whole stage at a time, with the scores of all its layers, instead of block by block"
        )
    else:
        parts.append(f"{of_a_layer}, which fused kernels do not store")
    if _recompute(layout, job) != layout.recompute:
        parts.append("attention recomputed, because without --recompute it stores the scores")
    return parts


def _other_differences(layout: ClusterLayout, job: Job) -> list[str]:
    """Return where what blocks keep of their other operations, the states and the time are not what the plan counts."""
    model, kept = job.model, layout.recompute != "full"
    grouped = model.gated and (model.kv_heads or model.heads) < model.heads
    experts = kept and model.experts
    reduced = "each micro-batch's gradients reduced at the links' speed, where the plan hides most of it"
    return _that_hold(
        (
            layout.recompute == "selective" and job.fused_attention,
            "outputs of norms and activation functions kept instead of recomputed",
        ),
        (kept, "4 bytes kept per token and norm"),
        (kept and model.gated, "four values of the MLP's inner size kept instead of three"),
        (kept and model.gated, "cosines and sines of the positions kept by each block"),
        (grouped and _recompute(layout, job) == "none", "keys and values kept once per query head"),
        (experts, "outputs of experts kept, and 2 bytes per token and expert of the router instead of 4"),
        (experts and layout.tp > 1, "inputs and outputs of experts kept at full width on every tensor-parallel rank"),
        # The states.
        (layout.zero == 3, "18 bytes per parameter instead of 16, divided by ZeRO 3"),
        (layout.zero != 3, "gradients of 2 bytes instead of 4"),
        (layout.zero == 2 and layout.microbatches > 1, reduced),
        (layout.host != "none", "a host with other speeds"),
        (True, "a clock at peak hardware speeds, without the time of kernel launches"),
    )


def no_command(layout: ClusterLayout, job: Job) -> str | None:
    """Return why minidist cannot run the layout, as a sentence, or None."""
    model = job.model
    if layout.dp % layout.ep:
        return (
            f"minidist divides experts among data-parallel ranks, and dp {layout.dp} is not divisible by ep {layout.ep}"
        )
    pairs = 2 if model.gated else 1  # rotary positions turn the two elements of each pair of a head
    if model.width % (pairs * model.heads):
        by = f"{pairs} x {model.heads}" if model.gated else f"{model.heads}"
        return f"minidist's models have heads of width / heads, and {model.width} is not divisible by {by}"
    return None


def _flags(layout: ClusterLayout, job: Job, sizes: dict[str, int]) -> str:
    """Return the flags of train and compare for a layout and a model's sizes."""
    flags: dict[str, object] = {"model": "llama" if job.model.gated else "gpt", **sizes}
    flags |= {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp", "ep") if getattr(layout, axis) > 1}
    if layout.zero:
        flags["zero"] = layout.zero
    if layout.vp > 1:
        flags |= {"schedule": "interleaved", "chunks": layout.vp}
    flags["micro-batch"] = layout.micro_batch
    flags["microbatches" if layout.pp > 1 else "accumulation"] = layout.microbatches
    if layout.recompute != "none":
        flags["recompute"] = layout.recompute
    if layout.host != "none":
        flags["offload"] = layout.host
    text = " ".join(f"--{name} {value}" for name, value in flags.items())
    return text + " --sequence-parallel" * layout.sequence_parallel
