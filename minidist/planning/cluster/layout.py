"""How a job is divided over a cluster: degrees of parallelism, batch, schedule, and what makes them impossible.

The ranks are numbered as Megatron-LM numbers them: tensor parallel fastest, then context, data and pipeline parallel,
so that the groups that send most lie inside a node.

Proved by: tests/planning/test_cluster.py
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from minidist.base.limits import check_count
from minidist.core.base.errors import UsageError
from minidist.planning.architecture import Architecture

RECOMPUTE = ("none", "selective", "full", "sqrt")
ATTENTION = ("fused", "unfused", "flash-1", "flash-2")
# What kernels keep of a gated block -> the shares of what eager ones keep in addition: least, likely, most.
KERNELS = {
    "any": (0.0, 0.5, 1.0),
    "fused": (0.0, 0.0, 0.0),
    "fused-norms": (1.0, 1.0, 1.0),  # of what is eager there: the activation function and the loss
    "eager": (1.0, 1.0, 1.0),
}
MAX_LENGTH = 10**8

# Bytes per parameter of the value, the gradient and the optimizer's states, below ZeRO 3 and with ZeRO 3.
ACCOUNTINGS = {
    "megatron": ((2, 4, 12), (4, 4, 8)),  # float32 sums of gradients; the shard of FSDP is value and master copy in one
    "zero": ((2, 2, 12), (2, 2, 12)),  # Rajbhandari et al., SC 2020, section 3.1
    "fp32-accumulation": ((2, 6, 12), (2, 6, 12)),  # 2-byte gradients and their float32 sums (Ultra-Scale Playbook)
    "float32-shard": ((2, 2, 16), (2, 2, 16)),  # 2-byte gradients, and a float32 copy of the optimizer's shard of them
}


@dataclass(frozen=True)
class Framework:
    """What a program does. kernels and accounting: where the job does not say them.

    whole_logits: each tensor-parallel rank gathers the logits of the whole vocabulary before the loss.
    """

    kernels: str
    accounting: str = "megatron"
    whole_logits: bool = False


FRAMEWORKS = {
    "any": Framework("any"),
    "megatron": Framework("fused"),
    "pytorch": Framework("eager"),
    "deepspeed": Framework("eager"),
    # Aleph Alpha's scaling: TransformerLMHead and ParameterGroup of its public source.
    "scaling": Framework("eager", "float32-shard", whole_logits=True),
}


@dataclass(frozen=True)
class ClusterLayout:
    """Degrees of parallelism and the micro-batches of one data-parallel rank.

    dp, tp, pp, cp: data, tensor, pipeline and context parallel ranks; ep divides the dp * cp (* tp) ranks of a stage;
    vp: the chunks of layers per pipeline rank; zero: ZeRO stage; micro_batch: sequences; microbatches: per step;
    recompute: none, selective, full (each block) or sqrt (each of sqrt(L) segments of a rank's L blocks). etp: the
    tensor-parallel ranks over which an expert is divided; None: all of tp, unless ep needs them. host: what is kept in
    host memory: none, optimizer, activations or parameters.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vp: int = 1
    zero: int = 0
    sequence_parallel: bool = False
    micro_batch: int = 1
    microbatches: int = 1
    recompute: str = "none"
    etp: int | None = None
    host: str = "none"

    @property
    def ranks(self) -> int:
        """Return the number of GPUs."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def schedule(self) -> str:
        """Return the pipeline schedule."""
        return "none" if self.pp == 1 else "1f1b" if self.vp == 1 else "interleaved"

    @property
    def runs_forward_twice(self) -> bool:
        """Return whether the backward pass computes every block again."""
        return self.recompute in ("full", "sqrt")

    @property
    def axes(self) -> int:
        """Return how many kinds of parallelism are used in addition to data parallelism."""
        return sum(degree > 1 for degree in (self.tp, self.pp, self.cp, self.ep)) + (self.zero > 1)

    @property
    def expert_tp(self) -> int:
        """Return over how many tensor-parallel ranks an expert is divided: `etp`, or all, unless ep needs them."""
        if self.etp is not None:
            return self.etp
        return self.tp if self.dp * self.cp % self.ep == 0 else 1

    @property
    def sharding_ranks(self) -> int:
        """Return the ranks that hold copies of the same parameters, over which ZeRO divides."""
        return self.dp * self.cp

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the schedule; etp is the number that is used."""
        return {**asdict(self), "etp": self.expert_tp, "schedule": self.schedule}

    def __str__(self) -> str:
        parts = [
            f"{name} {getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep", "vp") if getattr(self, name) > 1
        ]
        parts += [f"etp {self.etp}"] * (self.etp is not None and self.ep > 1)
        parts += [f"zero {self.zero}"] * (self.zero > 0) + ["sequence parallel"] * self.sequence_parallel
        parts += [f"micro-batch {self.micro_batch} x {self.microbatches}"]
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        return ", ".join(parts + [f"offload {self.host}"] * (self.host != "none"))


@dataclass(frozen=True)
class Job:
    """What is trained: a model, tokens per sequence, sequences per step, the precision, the number of GPUs.

    fused_attention: the scores are never stored (FlashAttention); without it a step keeps them. gradient_bytes: of an
    element of the gradients' sum, 4 (float32, as in Megatron-LM) or 2. expert_imbalance: the tokens of the busiest
    rank's experts, as a multiple of the mean. accounting: which source's bytes per parameter are counted. prefetch: the
    blocks that ZeRO 3 gathers ahead. kernels: of norms, activation functions and the loss: fused, eager, fused-norms
    (the others are eager), or any when unknown. attention_kernel: flash-1, flash-2, or any. framework: one of
    `FRAMEWORKS`. It decides the kernels when they are "any", and the accounting where the job does not. With deepspeed,
    as Narayanan et al. measured it, ZeRO 3 uses one network adapter of each node.
    """

    model: Architecture
    length: int
    global_batch: int
    precision: str = "bf16"
    gpus: int = 8
    fused_attention: bool = True
    dropout: bool | None = None
    gradient_bytes: int = 4
    expert_imbalance: float = 1.0
    accounting: str = "megatron"
    prefetch: int = 1
    kernels: str = "any"
    attention_kernel: str = "any"
    framework: str = "any"

    @property
    def has_dropout(self) -> bool:
        """Return whether blocks keep masks of dropout; by default those of GPT do."""
        return not self.model.gated if self.dropout is None else self.dropout

    @property
    def eager_shares(self) -> tuple[float, float, float]:
        """Return the least, the likely and the largest share of what eager kernels keep in addition to fused ones."""
        return KERNELS[self.likely_kernels]

    @property
    def likely_kernels(self) -> str:
        """Return the kernels: what is given, or else those of the framework; 8-bit floats come with fused ones."""
        if self.kernels != "any":
            return self.kernels
        return "fused" if self.precision == "fp8" else FRAMEWORKS[self.framework].kernels

    @property
    def has_whole_logits(self) -> bool:
        """Return whether each tensor-parallel rank of the last stage has the logits of the whole vocabulary."""
        return FRAMEWORKS[self.framework].whole_logits

    def state_bytes(self, zero: int) -> tuple[int, int, int]:
        """Return the bytes per parameter of the value, the gradient and the optimizer's states at a ZeRO stage."""
        accounting = FRAMEWORKS[self.framework].accounting if self.accounting == "megatron" else self.accounting
        value, gradient, optimizer = ACCOUNTINGS[accounting][zero == 3]
        return value, min(gradient, self.gradient_bytes) if accounting == "megatron" else gradient, optimizer


def check_length(length: int, model: Architecture) -> None:
    """Raise UsageError for tokens per sequence that are out of range, or that a model has no positions for."""
    check_count(length, "--seq", 1, MAX_LENGTH)
    if model.has_positions and length > model.positions:
        raise UsageError(
            f"--seq {length} is out of range: the model has learned positions for {model.positions} tokens; give"
            f" --seq {model.positions} or less"
        )


def length_to_give(model: Architecture | None) -> str:
    """Return which flag is missing, as the end of a sentence. model: one that has a name, and so positions, or None."""
    most = f" (the model can have {model.positions:,})" if model is not None and model.positions else ""
    return f"give --seq, the tokens of each{most}"


def busiest(layout: ClusterLayout, job: Job) -> float:
    """Return the tokens of the busiest rank's experts as a multiple of the mean: at most all tokens are on one rank."""
    return min(job.expert_imbalance, layout.ep)


def stage_layers(layout: ClusterLayout, layers: int) -> list[list[int]]:
    """Return the layers of each pipeline rank; where they do not divide, the first ranks have one more per chunk.

    With `vp` chunks, rank r has the chunks r, r + pp, r + 2 pp, ...
    """
    return _stage_layers(layout.pp, layout.vp, layers)


@lru_cache(maxsize=4096)
def _stage_layers(pp: int, vp: int, layers: int) -> list[list[int]]:
    chunks = pp * vp
    ends = [layers * (chunk + 1) // chunks for chunk in range(chunks)]
    # Floors grow towards the end; the last chunk has the output projection, so the larger ones come first.
    sizes = sorted((end - start for start, end in zip([0, *ends], ends, strict=False)), reverse=True)
    starts = [sum(sizes[:chunk]) for chunk in range(chunks)]
    return [
        [layer for chunk in range(rank, chunks, pp) for layer in range(starts[chunk], starts[chunk] + sizes[chunk])]
        for rank in range(pp)
    ]


def refusal(layout: ClusterLayout, job: Job) -> str | None:
    """Return why a layout is not possible for a job, as a sentence, or None."""
    e, sequences = layout, layout.dp * layout.micro_batch * layout.microbatches
    if e.ranks != job.gpus:
        return f"dp {e.dp} x tp {e.tp} x pp {e.pp} x cp {e.cp} is {e.ranks:,} ranks, and the job has {job.gpus:,} GPUs"
    if sequences != job.global_batch:
        return (
            f"dp {e.dp} x micro-batch {e.micro_batch} x {e.microbatches} micro-batches is {sequences:,} sequences, and"
            f" the global batch has {job.global_batch:,}"
        )
    return _of_tensors(e, job.model) or _of_layers(e, job) or _of_experts(e, job.model)


def _of_tensors(e: ClusterLayout, model: Architecture) -> str | None:
    """Return why the matrices of a model cannot be divided among tensor-parallel ranks, or None."""
    if e.etp is not None and not model.experts:
        return f"etp {e.etp} needs a model with experts"
    if e.tp % e.expert_tp:
        return f"etp {e.etp} does not divide tp {e.tp}"
    if model.heads % e.tp:
        return f"{model.heads} heads are not divisible by tp {e.tp}"
    if model.inner % e.tp:
        return f"the MLP's {model.inner} is not divisible by tp {e.tp}"
    expert = model.expert_inner or model.inner
    if model.experts and expert % e.expert_tp:
        return f"an expert's width of {expert} is not divisible by tp {e.expert_tp}"
    if model.kv_heads is not None and max(model.kv_heads, e.tp) % min(model.kv_heads, e.tp):
        return f"{model.kv_heads} key-value heads and tp {e.tp} do not divide each other"
    return None


def _of_layers(e: ClusterLayout, job: Job) -> str | None:
    """Return why the layers or the positions of a job cannot be divided, or None."""
    if e.pp * e.vp > job.model.layers:
        return f"pp {e.pp} x vp {e.vp} is more than the model's {job.model.layers} layers"
    if e.vp > 1 and e.pp == 1:
        return f"vp {e.vp} needs a pipeline (pp above 1)"
    if e.vp > 1 and e.microbatches % e.pp:
        return f"the interleaved schedule needs micro-batches ({e.microbatches}) divisible by pp {e.pp}"
    if e.sequence_parallel and e.tp == 1:
        return "sequence parallelism needs tp above 1"
    if e.cp > 1 and job.length % (2 * e.cp):
        return f"a sequence of {job.length:,} is not divisible into 2 x cp {e.cp} chunks"
    if e.sequence_parallel and job.length // e.cp % e.tp:
        return f"{job.length // e.cp:,} positions of a rank are not divisible by tp {e.tp}"
    return None


def _of_experts(e: ClusterLayout, model: Architecture) -> str | None:
    """Return why the experts of a model cannot be divided, or ZeRO cannot be used, or None."""
    ranks = f"dp {e.dp} x cp {e.cp} x tp {e.tp}"
    if e.ep > 1 and not model.experts:
        return f"ep {e.ep} needs a model with experts"
    if model.experts % e.ep:
        return f"{model.experts} experts are not divisible by ep {e.ep}"
    if e.dp * e.cp * e.tp % e.ep:
        return f"ep {e.ep} does not divide {ranks}"
    if e.dp * e.cp * e.tp % (e.ep * e.expert_tp):
        return f"ep {e.ep} x etp {e.etp} does not divide {ranks}"
    if e.host == "parameters" and e.zero != 3:
        return f"parameters on the host need ZeRO 3, not {e.zero}"
    if e.zero == 3 and e.vp > 1:
        return f"ZeRO 3 would gather the layers of each of vp {e.vp} chunks for each micro-batch"
    return None


def check_layout(layout: ClusterLayout, job: Job) -> None:
    """Raise UsageError with the reason and the remedy when a layout is not possible for a job."""
    reason = refusal(layout, job)
    if reason:
        raise UsageError(f"{reason}; change one of them")
