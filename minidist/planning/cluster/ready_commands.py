"""Commands that try a planned layout with minidist itself: a dry run of its size, and a small copy that is compared.

The planner's numbers are formulas; the two commands run the layout:

    dry run    minidist train ... --dry-run: the whole program with these degrees on arrays without data, which gives
               the exact bytes and the peak of every rank
    compare    minidist compare ...: the same axes with two ranks each on a model of a few thousand parameters, which
               trains and is compared with one device, value by value

Both train minidist's own GPT or Llama on bytes, so the vocabulary has 256 tokens, and Llama's inner size is 8/3 of the
width. What differs otherwise is said by `differences`.

Proved by: tests/planning/test_ready_commands.py
"""

from dataclasses import replace

from minidist.planning.cluster.layout import ClusterLayout, Job

MAX_TOP_K = 2  # experts per token that minidist trains with
PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


def dry_run_command(layout: ClusterLayout, job: Job) -> str:
    """Return the command that runs one step of the layout without data."""
    model = job.model
    sizes = {"layers": model.layers, "width": model.width, "heads": model.heads, "context": job.length}
    if model.gated and (model.kv_heads or model.heads) != model.heads:
        sizes["kv-heads"] = model.kv_heads or model.heads
    if model.experts:
        sizes |= {"experts": model.experts, "top-k": min(model.top_k, MAX_TOP_K)}
    flags = _flags(layout, job, sizes)
    return f"minidist train {flags} --precision {PRECISIONS[job.precision]} --steps 1 --dry-run"


def compare_command(layout: ClusterLayout, job: Job) -> str:
    """Return the command that trains a small copy of the layout, at most two ranks per axis, beside one device."""
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
    """Return in what the dry run's model differs from the planned one, as parts of a sentence; usually little."""
    model = job.model
    parts = [f"a vocabulary of 256 in place of {model.vocabulary:,}"] if model.vocabulary != 256 else []
    inner = -(-8 * model.width // (3 * model.heads)) * model.heads if model.gated else 4 * model.width
    for ours, theirs, what in (
        (inner, model.expert_inner or model.inner, "an inner size"),
        (min(model.top_k, MAX_TOP_K), model.top_k, "experts per token"),
        (0, model.shared_experts, "shared experts"),
        (0, model.dense_layers, "layers without experts"),
        (model.width // model.heads, model.query_size // model.heads, "a head size"),
    ):
        if ours != theirs:
            parts.append(f"{what} {ours:,} in place of {theirs:,}")
    if model.latent:
        parts.append("attention without latent projections")
    if job.precision not in ("fp16", "bf16"):
        parts.append(f"bf16 in place of {job.precision}")
    return parts


def no_command(layout: ClusterLayout, job: Job) -> str | None:
    """Return why minidist cannot run the layout, as a sentence, or None."""
    model = job.model
    if layout.dp % layout.ep:
        return (
            f"minidist divides experts among data-parallel ranks, and dp {layout.dp} is not divisible by ep {layout.ep}"
        )
    if model.width % model.heads:
        return f"minidist's models have heads of width / heads, and {model.width} is not divisible by {model.heads}"
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
    text = " ".join(f"--{name} {value}" for name, value in flags.items())
    return text + " --sequence-parallel" * layout.sequence_parallel
