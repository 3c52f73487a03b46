"""The planner's predictions next to the tables of papers, by source: docs/planner_tables.md, part of docs/planner.md.

    python docs/planner_tables.py        writes both pages and the picture

Counts and rates that follow from a formula (parameters, days, MFU) are calculated from the published step times, and
must agree exactly. Peaks and step times are predictions of one calibration for all tables.

Proved by: tests/planning/test_published.py
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from minidist.planning.architecture import Architecture, named
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import ACCOUNTINGS, ClusterLayout, Job
from minidist.planning.cluster.memory import block_activations, divided_states
from minidist.planning.cluster.search import Plan
from minidist.planning.cluster.step_time import StepModel
from minidist.planning.family import families
from minidist.planning.parts import LatentAttention
from minidist.report.frame import finish, line, new_figure, save, tidy
from minidist.report.palette import RANKS, SPARE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREDICTED = ("s per step", "TFLOP/s per GPU", "tokens per second and GPU", "thousand GPU hours", "GB", "GiB")
GIB = 2**30
DAY = 86_400
START = "<!-- from here on: python docs/planner_tables.py -->\n"


@dataclass(frozen=True)
class Row:
    """One published value. tolerance: how far the prediction may be, 0 for formulas."""

    what: str
    published: float
    predicted: float
    tolerance: float
    unit: str
    digits: int = 1
    slack: float = 0.0  # of a formula: how much its inputs may be off, as they are rounded where they are printed

    @property
    def ratio(self) -> float:
        """Return predicted / published."""
        return self.predicted / self.published

    @property
    def is_absolute(self) -> bool:
        """Return whether the value is of a whole step or of a GPU's memory, and not a share or of one layer."""
        return self.unit.startswith(PREDICTED)

    @property
    def agrees(self) -> bool:
        """Return whether the prediction is within the tolerance; a formula must round to what is printed."""
        rounding = 0.501 * 10.0**-self.digits + self.slack * self.published
        return abs(self.predicted - self.published) <= max(rounding, self.tolerance * self.published)


@dataclass(frozen=True)
class Table:
    """The rows of one published table."""

    title: str
    source: str
    rows: list[Row]
    note: str = ""
    ran: tuple[Plan, ...] = ()  # the plans of what was run, so of what fits


def _gpt(layers: int, hidden: int, heads: int) -> Architecture:
    return Architecture(layers, hidden, heads, 51_200, 2048, 4 * hidden)


# Narayanan et al., SC 2021, table 1: layers, hidden, heads, tp, pp, GPUs, batch, 1e9 parameters, TFLOP/s per GPU.
WEAK_SCALING = (
    (24, 2304, 24, 1, 1, 32, 512, 1.7, 137),
    (30, 3072, 32, 2, 1, 64, 512, 3.6, 138),
    (36, 4096, 32, 4, 1, 128, 512, 7.5, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 18.4, 135),
    (48, 8192, 64, 8, 2, 512, 1536, 39.1, 138),
    (60, 10240, 80, 8, 4, 1024, 1792, 76.1, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 145.6, 148),
    (96, 16384, 128, 8, 16, 1920, 2160, 310.1, 155),
    (105, 20480, 128, 8, 35, 2520, 2520, 529.6, 163),
    (128, 25600, 160, 8, 64, 3072, 3072, 1008.0, 163),
)
# Table 2: layers, hidden, heads, tp, pp, ZeRO stage, micro-batch, GPUs, batch, days for 300e9 tokens, TFLOP/s per GPU.
ZERO_OR_PIPELINE = (
    (96, 12288, 96, 1, 1, 3, 4, 384, 1536, 90, 144),
    (96, 12288, 96, 1, 1, 3, 2, 768, 1536, 74, 88),
    (96, 12288, 96, 1, 1, 3, 1, 1536, 1536, 74, 44),
    (105, 20480, 128, 1, 1, 3, 4, 640, 2560, 169, 138),
    (105, 20480, 128, 1, 1, 3, 2, 1120, 2240, 137, 98),
    (105, 20480, 128, 1, 1, 3, 1, 2240, 2240, 140, 48),
    (96, 12288, 96, 8, 12, 0, 1, 384, 1536, 84, 153),
    (96, 12288, 96, 8, 12, 0, 1, 768, 1536, 43, 149),
    (96, 12288, 96, 8, 12, 0, 1, 1536, 1536, 23, 141),
    (105, 20480, 128, 8, 35, 0, 1, 560, 2240, 156, 171),
    (105, 20480, 128, 8, 35, 0, 1, 1120, 2240, 80, 167),
    (105, 20480, 128, 8, 35, 0, 1, 2240, 2240, 42, 159),
)
# Korthikanti et al., 2022. Name: layers, hidden, heads, GPUs, pp, vp, micro-batch, batch (table 3); seconds with full
# recomputation, and with sequence parallelism and selective recomputation, MFU and HFU in percent (table 5); GiB of
# states, of activations without recomputation, and with both techniques (figure 1).
ACTIVATIONS = {
    "22B": (48, 6144, 64, 8, 1, 1, 4, 4, 1.42, 1.10, 41.5, 43.7, 45.5625, 59.25, 9.5625),
    "175B": (96, 12288, 96, 64, 8, 3, 1, 64, 18.13, 13.75, 51.4, 52.8, 45.5625, 66.84375, 12.3515625),
    "530B": (105, 20480, 128, 280, 35, 3, 1, 280, 49.05, 37.83, 56.0, 57.0, 31.640625, 114.0234375, 23.076171875),
    "1T": (128, 25600, 160, 512, 64, 1, 1, 512, 94.42, 71.49, 56.3, 57.0, 32.958984375, 131.25, 26.5625),
}
# Figure 7: percent of tensor parallelism's activations with sequence parallelism, selective recomputation, both, full.
SHARES = {
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}
# Table 4: milliseconds of one layer of the 22B model, forward and backward.
LAYER = {
    "baseline": (7.7, 11.9, False, "none"),
    "sequence parallel": (7.2, 11.8, True, "none"),
    "full recomputation": (7.7, 19.5, False, "full"),
    "selective recomputation": (7.7, 13.2, False, "selective"),
    "both": (7.2, 13.1, True, "selective"),
}
# Rajbhandari et al., 2020, table 1: GB of states for 7.5e9, 128e9 and 1e12 parameters with stages 1, 2, 3, by ranks.
STATES = {
    1: (120, 120, 120, 2048, 2048, 2048, 16000, 16000, 16000),
    4: (52.5, 41.3, 30, 896, 704, 512, 7000, 5500, 4000),
    16: (35.6, 21.6, 7.5, 608, 368, 128, 4750, 2875, 1000),
    64: (31.4, 16.6, 1.88, 536, 284, 32, 4187, 2218, 250),
    256: (30.4, 15.4, 0.47, 518, 263, 8, 4046, 2054, 62.5),
    1024: (30.1, 15.1, 0.12, 513, 257, 2, 4011, 2013, 15.6),
}
# torchtitan (arXiv:2410.06511), Llama 3.1: what, model, GPUs, length, precision, tp, pp, cp, micro-batch, batch,
# recomputation, tokens per second of a GPU, GiB reserved.
TORCHTITAN = (
    ("FSDP", "8b", 8, 8192, "bf16", 1, 1, 1, 2, 16, "selective", 5762, 82.4),
    ("FSDP, compiled", "8b", 8, 8192, "bf16", 1, 1, 1, 2, 16, "selective", 6667, 77.0),
    ("FSDP, compiled, float8", "8b", 8, 8192, "fp8", 1, 1, 1, 2, 16, "selective", 8532, 76.8),
    ("FSDP", "8b", 128, 8192, "bf16", 1, 1, 1, 2, 256, "selective", 5605, 67.0),
    ("FSDP, compiled", "8b", 128, 8192, "bf16", 1, 1, 1, 2, 256, "selective", 6514, 62.0),
    ("FSDP, compiled, float8", "8b", 128, 8192, "fp8", 1, 1, 1, 2, 256, "selective", 8380, 61.8),
    ("FSDP and tensor parallel", "70b", 256, 8192, "fp8", 8, 1, 1, 16, 512, "full", 829, 0),
    ("with asynchronous tensor parallel", "70b", 256, 8192, "fp8", 8, 1, 1, 16, 512, "full", 876, 0),
    ("FSDP", "8b", 8, 32_768, "fp8", 1, 1, 1, 1, 8, "full", 3890, 0),
    ("context parallel 2", "8b", 8, 65_536, "fp8", 1, 1, 2, 1, 4, "full", 2540, 0),
    ("context parallel 4", "8b", 8, 131_072, "fp8", 1, 1, 4, 1, 2, "full", 1071, 0),
    ("context parallel 8", "8b", 8, 262_144, "fp8", 1, 1, 8, 1, 1, "full", 548, 0),
    ("all axes", "405b", 512, 32_768, "fp8", 8, 8, 1, 1, 64, "full", 76, 0),
    ("all axes, context parallel 2", "405b", 512, 65_536, "fp8", 8, 8, 2, 1, 32, "full", 47, 0),
    ("all axes, context parallel 4", "405b", 512, 131_072, "fp8", 8, 8, 4, 1, 16, "full", 31, 0),
    ("all axes, context parallel 8", "405b", 512, 262_144, "fp8", 8, 8, 8, 1, 8, "full", 16, 0),
)
# Llama Team, 2024 (arXiv:2407.21783v3), table 4: GPUs, dp, batch, TFLOP/s per GPU, MFU in percent; tp 8, pp 16.
LLAMA3 = ((8192, 64, 2048, 430, 43), (16_384, 128, 2048, 400, 41))
# MLPerf Training 4.1, GPT-3 175B: machine, dp, seconds of a step (median); tp 4, pp 8, vp 6, 2,048 sequences.
MLPERF = (("h100", 8, 18.3716), ("h100", 16, 9.4931), ("b200", 2, 36.0459))

# Qi et al., 2023, table 4: layers, hidden, heads, pipeline ranks (one node per 8), micro-batch; GB of the fullest rank
# with 1F1B and with the interleaved schedule. The first and the last rank have one layer less.
ZERO_BUBBLE = (
    (22, 2304, 24, 8, 6, 30, 40),
    (30, 4096, 32, 8, 3, 39, 48),
    (46, 5120, 40, 16, 1, 32, 39),
    (62, 6144, 48, 32, 1, 43, 58),
)


def _megatron(layers: int, hidden: int, heads: int, layout: ClusterLayout, batch: int) -> Plan:
    job = Job(
        _gpt(layers, hidden, heads),
        2048,
        batch,
        "fp16",
        layout.ranks,
        fused_attention=False,
        dropout=True,
        framework="deepspeed" if layout.zero == 3 else "megatron",
    )
    return Plan(layout, job, machine_of("a100-80gb"))


def _counted_flops(plan: Plan) -> float:
    """Return the FLOPs of a step as Narayanan et al. count them (appendix): the blocks' forward pass twice."""
    model, s = plan.job.model, plan.job.length
    layers, h = model.layers, model.width
    return 96 * plan.job.global_batch * s * layers * h**2 * (1 + s / (6 * h) + model.vocabulary / (16 * layers * h))


def _teraflops(plan: Plan) -> float:
    """Return the predicted TFLOP/s per GPU."""
    return _counted_flops(plan) / (plan.time.seconds * plan.job.gpus) / 1e12


def weak_scaling() -> Table:
    """Return Narayanan et al., table 1. The micro-batch is not given: the fastest of 1 to 8 that fits is taken."""
    rows, ran = [], []
    for layers, hidden, heads, tp, pp, gpus, batch, billions, teraflops in WEAK_SCALING:
        dp = gpus // tp // pp
        tried = [
            _megatron(
                layers,
                hidden,
                heads,
                ClusterLayout(dp, tp, pp, micro_batch=micro, microbatches=batch // dp // micro, recompute="full"),
                batch,
            )
            for micro in (1, 2, 4, 8)
            if batch // dp % micro == 0
        ]
        plan = min(tried, key=lambda plan: (not plan.fit.fits, plan.time.seconds))
        ran.append(plan)
        name = f"{billions:g}B on {gpus:,} GPUs"
        counted = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51_200 + 2048) / (12 * layers * hidden))
        rows.append(Row(name, billions, counted / 1e9, 0, "billion parameters"))
        rows.append(Row(name, teraflops, _teraflops(plan), 0.2, "TFLOP/s per GPU", 0))
    return Table("Megatron-LM, table 1", "Narayanan et al., SC 2021 (arXiv:2104.04473)", rows, ran=tuple(ran))


def zero_or_pipeline() -> Table:
    """Return Narayanan et al., table 2."""
    rows, ran = [], []
    for layers, hidden, heads, tp, pp, zero, micro, gpus, batch, days, teraflops in ZERO_OR_PIPELINE:
        dp = gpus // tp // pp
        layout = ClusterLayout(
            dp, tp, pp, zero=zero, micro_batch=micro, microbatches=batch // dp // micro, recompute="full"
        )
        plan = _megatron(layers, hidden, heads, layout, batch)
        ran.append(plan)
        name = f"{plan.job.model.parameters / 1e9:.1f}B on {gpus:,} GPUs, {'ZeRO 3' if zero else f'tp {tp}, pp {pp}'}"
        per_token = _counted_flops(plan) / (batch * 2048)
        exact = 300e9 * per_token / (gpus * teraflops * 1e12) / DAY
        rows.append(Row(name, days, exact, 0, "days for 300e9 tokens", 0, slack=0.5 / teraflops))
        rows.append(Row(name, teraflops, _teraflops(plan), 0.2, "TFLOP/s per GPU", 0))
    return Table("Megatron-LM, table 2", "Narayanan et al., SC 2021 (arXiv:2104.04473)", rows, ran=tuple(ran))


def _korthikanti(name: str, sequence_parallel: bool, recompute: str) -> Plan:
    layers, hidden, heads, gpus, pp, vp, micro, batch = ACTIVATIONS[name][:8]
    layout = ClusterLayout(
        gpus // 8 // pp,
        8,
        pp,
        vp=vp,
        sequence_parallel=sequence_parallel,
        micro_batch=micro,
        microbatches=batch // micro,
        recompute=recompute,
    )
    return _megatron(layers, hidden, heads, layout, batch)


def activations() -> Table:
    """Return Korthikanti et al., figures 1 and 7: states and activations of a GPU."""
    rows = []
    for name, values in ACTIVATIONS.items():
        states, none, both = values[12:]
        plain, shared = _korthikanti(name, False, "none"), _korthikanti(name, True, "selective")
        # The figure leaves out the embedding: a rank in the middle of the pipeline has none.
        model, pp = plain.job.model, plain.layout.pp
        per_rank = 18 * (model.block * model.layers // pp) // 8
        rows.append(Row(name, states, per_rank / GIB, 0.1, "GiB of states"))
        kept = [sum(plan.memory[0].by_kind[kind] for kind in ("activations", "logits")) for plan in (plain, shared)]
        rows.append(Row(name, none, kept[0] / GIB, 0.1, "GiB of activations"))
        rows.append(Row(name, both, kept[1] / GIB, 0.1, "GiB of activations, sequence parallel and selective"))
    for name, shares in SHARES.items():
        whole = _layer_bytes(name, False, "none")
        labels = ("sequence parallel", "selective", "both", "full")
        settings = ((True, "none"), (False, "selective"), (True, "selective"), (False, "full"))
        for label, share, (sequence_parallel, recompute) in zip(labels, shares, settings, strict=True):
            percent = 100 * _layer_bytes(name, sequence_parallel, recompute) / whole
            rows.append(Row(f"{name}, {label}", share, percent, 0.1, "% of tensor parallelism's activations"))
    note = "Figures read by Calculon (calculon/llm/validation.py), so to a pixel."
    return Table("Activation recomputation, figures 1 and 7", "Korthikanti et al., 2022 (arXiv:2205.05198)", rows, note)


def _layer_bytes(name: str, sequence_parallel: bool, recompute: str) -> int:
    plan = _korthikanti(name, sequence_parallel, recompute)
    return block_activations(plan.layout, plan.job, 0)


def recomputation_times() -> Table:
    """Return Korthikanti et al., tables 4 and 5."""
    rows: list[Row] = []
    ran: list[Plan] = []
    for name, (forward, backward, sequence_parallel, recompute) in LAYER.items():
        plan = _korthikanti("22B", sequence_parallel, recompute)
        one = StepModel(plan.layout, plan.job, plan.machine).layer_pass(0)
        messages = 1e3 * sum(one.messages.values())
        total = 1e3 * (one.forward + one.backward) + messages
        rows.append(Row(f"a layer of 22B, {name}", forward + backward, total, 0.2, "ms forward and backward"))
    for name, values in ACTIVATIONS.items():
        full, both, mfu, hfu = values[8:12]
        plans = _korthikanti(name, False, "full"), _korthikanti(name, True, "selective")
        ran += plans
        rows.append(Row(f"{name}, full recomputation", full, plans[0].time.seconds, 0.2, "s per step", 2))
        rows.append(Row(f"{name}, sequence parallel, selective", both, plans[1].time.seconds, 0.2, "s per step", 2))
        peak = plans[1].job.gpus * 312e12
        rows.append(Row(name, mfu, 100 * plans[1].model_flops / (both * peak), 0, "% MFU", slack=0.005 / both))
        rows.append(Row(name, hfu, 100 * plans[1].hardware_flops / (both * peak), 0, "% HFU", slack=0.005 / both))
    source = "Korthikanti et al., 2022 (arXiv:2205.05198)"
    return Table("Activation recomputation, tables 4 and 5", source, rows, ran=tuple(ran))


def zero_states() -> Table:
    """Return Rajbhandari et al., table 1, in the paper's accounting."""
    rows = []
    for ranks, values in STATES.items():
        cells = iter(values)
        for size in (7_500_000_000, 128_000_000_000, 1_000_000_000_000):
            for stage in (1, 2, 3):
                published = next(cells)
                total = sum(divided_states(size, ranks, stage, ACCOUNTINGS["zero"][0]).values()) / 1e9
                # Cells of thousands are cut off, not rounded, in the paper.
                rows.append(Row(f"{size / 1e9:g}B on {ranks} ranks, stage {stage}", published, total, 0.005, "GB", 2))
    return Table("ZeRO, table 1", "Rajbhandari et al., SC 2020 (arXiv:1910.02054)", rows)


def torchtitan() -> Table:
    """Return torchtitan's tables."""
    rows, ran = [], []
    for what, size, gpus, length, precision, tp, pp, cp, micro, batch, recompute, speed, gib in TORCHTITAN:
        model = replace(named(f"llama-3.1-{size}"), positions=length)
        dp = gpus // tp // pp // cp
        layout = ClusterLayout(
            dp,
            tp,
            pp,
            cp,
            zero=3 if pp == 1 else 2,
            sequence_parallel=tp > 1,
            micro_batch=micro,
            microbatches=batch // dp // micro,
            recompute=recompute,
        )
        kernels = "fused" if "compiled" in what or precision == "fp8" else "eager"
        job = Job(model, length, batch, precision, gpus, kernels=kernels)
        plan = Plan(layout, job, machine_of("h100-96gb"))
        ran.append(plan)
        name = f"{size.upper()} on {gpus} GPUs, {length:,} tokens, {what}"
        rows.append(Row(name, speed, plan.tokens_per_second / gpus, 0.2, "tokens per second and GPU", 0))
        if gib:
            rows.append(Row(name, gib, plan.fullest.likely(job) / GIB, 0.1, "GiB reserved"))
    note = (
        "Compiled programs have fused kernels, and the others PyTorch's. Peaks with full recomputation are left"
        " out: what the allocator had reserved filled the GPU in all of them."
    )
    return Table("torchtitan, tables 1 to 4 and 6", "Liang et al., 2024 (arXiv:2410.06511)", rows, note, tuple(ran))


def llama3() -> Table:
    """Return the Llama 3 report's table 4; its MFU counts 6 FLOPs per parameter and token."""
    rows, ran = [], []
    model = replace(named("llama-3.1-405b"), positions=8192)
    for gpus, dp, batch, teraflops, mfu in LLAMA3:
        layout = ClusterLayout(dp, 8, 16, vp=7, zero=2, sequence_parallel=True, microbatches=batch // dp)
        plan = Plan(layout, Job(model, 8192, batch, "bf16", gpus, kernels="fused"), machine_of("h100"))
        ran.append(plan)
        achieved = 6 * model.parameters * batch * 8192 / (plan.time.seconds * gpus) / 1e12
        rows.append(Row(f"{gpus:,} GPUs, dp {dp}", teraflops, achieved, 0.2, "TFLOP/s per GPU", 0))
        rows.append(Row(f"{gpus:,} GPUs, dp {dp}", mfu, 100 * teraflops / 989.4, 0.02, "% MFU", 0))
    note = (
        "The report gives no number of chunks: 7 per rank are taken. Its third row (131,072 tokens) has masks of"
        " documents, whose lengths are not published. The first version of the report prints dp 4 in that row;"
        " 8 x 16 x 16 x 4 is not 16,384, and `minidist plan` refuses it."
    )
    return Table("Llama 3 405B, table 4", "Llama Team, 2024 (arXiv:2407.21783)", rows, note, tuple(ran))


def mlperf() -> Table:
    """Return MLPerf Training 4.1's GPT-3 175B."""
    rows, ran = [], []
    model = _gpt(96, 12288, 96)
    for gpu, dp, seconds in MLPERF:
        layout = ClusterLayout(
            dp, 4, 8, vp=6, zero=1, sequence_parallel=True, micro_batch=2, microbatches=2048 // dp // 2
        )
        plan = Plan(layout, Job(model, 2048, 2048, "fp8", layout.ranks), machine_of(gpu))
        ran.append(plan)
        rows.append(Row(f"{layout.ranks} x {gpu}", seconds, plan.time.seconds, 0.2, "s per step", 2))
    source = "MLCommons, training_results_v4.1, NVIDIA's runs"
    return Table("MLPerf Training 4.1, GPT-3 175B", source, rows, ran=tuple(ran))


def zero_bubble_plans() -> Iterator[tuple[str, float, Plan]]:
    """Yield (name, GB, plan) of Qi et al., table 4: the two schedules that the planner has."""
    for layers, hidden, heads, pp, micro, one, interleaved in ZERO_BUBBLE:
        for what, gigabytes, vp in (("1F1B", one, 1), ("interleaved", interleaved, -(-layers // pp))):
            model = Architecture(layers, hidden, heads, 50_304, 1024, 4 * hidden)
            job = Job(model, 1024, 3 * pp * micro, "fp16", pp, fused_attention=False, dropout=True)
            layout = ClusterLayout(pp=pp, vp=vp, micro_batch=micro, microbatches=3 * pp)
            name = f"{model.parameters / 1e9:.1f}B on {pp} GPUs, {what}"
            yield name, gigabytes, Plan(layout, job, machine_of("a100-80gb"))


def zero_bubble() -> Table:
    """Return the peaks of Qi et al., table 4."""
    # The planner gives the first rank as many layers as the second, whose peak is that of the paper's fullest one.
    plans = list(zero_bubble_plans())
    rows = [
        Row(name, gigabytes, plan.memory[1].peak / 1e9, 0.1, "GB at the peak", 0) for name, gigabytes, plan in plans
    ]
    note = "None of these peaks was used to fit a constant."
    ran = tuple(plan for _, _, plan in plans)
    return Table("Zero Bubble, table 4", "Qi et al., 2023 (arXiv:2401.10241)", rows, note, ran)


def deepseek_v3() -> Table:
    """Return DeepSeek-V3's parameters and GPU hours."""
    attention = LatentAttention(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128)
    model = Architecture(
        61,
        7168,
        128,
        129_280,
        4096,
        18_432,
        gated=True,
        experts=256,
        top_k=8,
        expert_groups=(8, 4),
        expert_inner=2048,
        shared_experts=1,
        dense_layers=3,
        latent=attention,
    )
    layout = ClusterLayout(128, 1, 16, ep=64, zero=1, microbatches=120, recompute="selective")
    plan = Plan(layout, Job(model, 4096, 15_360, "fp8", 2048), machine_of("h800"))
    time = plan.time

    # DualPipe computes while tokens are exchanged (section 3.2.1).
    hidden = replace(time, exposed={axis: seconds for axis, seconds in time.exposed.items() if axis != "ep"})
    thousands = 1e12 / plan.tokens_per_second * 2048 / 3600 / 1e3
    unit = "thousand GPU hours for 1e12 tokens"
    rows = [
        Row("parameters", 671, model.parameters / 1e9, 0, "billion", 0),
        Row("2,048 x h800, exchanges hidden", 180, thousands * hidden.seconds / time.seconds, 0.2, unit, 0),
        Row("2,048 x h800, exchanges not hidden", 180, thousands, 0.2, unit, 0),
    ]
    note = (
        "No constant was fitted to these values. The planner has no schedule that hides exchanges as DualPipe does: the"
        " last row is what it predicts, the row before it leaves the exchanges' seconds out."
    )
    return Table("DeepSeek-V3, table 1", "DeepSeek-AI, 2024 (arXiv:2412.19437)", rows, note)


@cache
def tables() -> tuple[Table, ...]:
    """Return all tables."""
    return (
        weak_scaling(),
        zero_or_pipeline(),
        activations(),
        recomputation_times(),
        zero_states(),
        torchtitan(),
        llama3(),
        mlperf(),
        zero_bubble(),
        deepseek_v3(),
    )


class Decision(NamedTuple):
    """Whether a job fits on a GPU: what is known, and what the planner says."""

    what: str
    known: bool
    predicted: bool


def fit_decisions() -> list[Decision]:
    """Return the decisions of the planner about jobs that are known to fit, or known not to fit.

    What was run fits. Of figure 1 of Korthikanti et al., the models without recomputation do not fit in 80 GB.
    """
    found = [
        Decision(f"{table.title}: {plan.job.model.parameters / 1e9:.1f}B, {plan.layout}", True, plan.fit.fits)
        for table in tables()
        for plan in table.ran
    ]
    for name in ACTIVATIONS:
        plan = _korthikanti(name, False, "none")
        found.append(Decision(f"Activation recomputation, figure 1: {name}, no recomputation", False, plan.fit.fits))
    return found


def predictions() -> list[tuple[Table, Row]]:
    """Return the rows of all tables that are predictions of a step or of memory, and not values of a formula."""
    return [(table, row) for table in tables() for row in table.rows if row.tolerance > 0.005 and row.is_absolute]


def summary_markdown() -> str:
    """Format how far the predictions are off, by table, and the eight that are furthest off."""
    groups: dict[str, list[Row]] = {}
    for table, row in predictions():
        groups.setdefault(table.title, []).append(row)
    lines = ["| | values | mean error | median ratio | largest error |", "|---|---|---|---|---|"]
    for title, rows in groups.items():
        errors = [abs(row.ratio - 1) for row in rows]
        middle = median(row.ratio for row in rows)
        lines.append(f"| {title} | {len(rows)} | {fmean(errors):.0%} | {middle:.2f} | {max(errors):.0%} |")
    furthest = sorted(predictions(), key=lambda pair: -abs(log(pair[1].ratio)))[:8]
    lines += ["", "The eight that are furthest off:", ""]
    lines += ["| | published | predicted | ratio | unit |", "|---|---|---|---|---|"]
    for table, row in furthest:
        lines.append(
            f"| {table.title}: {row.what} | {row.published:,.{row.digits}f} | {row.predicted:,.{row.digits}f} |"
            f" {row.ratio:.2f} | {row.unit} |"
        )
    return "\n".join(lines) + "\n"


def scatter() -> "Figure":
    """Draw every prediction against the published value, both in the unit of its table, on logarithmic axes."""
    figure = new_figure(7, 6)
    axes = figure.add_subplot()
    handles = []
    by_table: dict[str, list[Row]] = {}
    for table, row in predictions():
        by_table.setdefault(table.title.partition(",")[0], []).append(row)
    for colour, marker, (title, rows) in zip((*RANKS, *SPARE), "osD^v<>pPX", by_table.items(), strict=False):
        axes.scatter([r.published for r in rows], [r.predicted for r in rows], s=14, color=colour, marker=marker)
        handles.append(line(colour, title, marker=marker, linestyle="", markersize=4))
    values = [value for _, row in predictions() for value in (row.published, row.predicted)]
    ends = [0.8 * min(values), 1.25 * max(values)]
    for factor, style in ((1.0, "-"), (0.8, ":"), (1.25, ":")):
        axes.plot(ends, [factor * end for end in ends], color="#333333", lw=0.8, linestyle=style)
    handles.append(line("#333333", "within 25 %", linestyle=":"))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published", ylabel="predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    tidy(axes)
    axes.set_title("steps (s, tokens/s, TFLOP/s) and memory (GB, GiB) of papers", fontsize=10, loc="left")
    return finish(figure, handles, "python docs/planner_tables.py")


def fits_markdown() -> str:
    """Format the decisions for docs/planner.md."""
    decisions = fit_decisions()
    wrong = [one for one in decisions if one.known != one.predicted]
    large = sum(not one.known for one in decisions)
    ran, right = len(decisions) - large, len(decisions) - len(wrong)
    lines = [
        "## Does it fit",
        "",
        f"Of {len(decisions)} jobs it is known whether they fit: {ran} of the tables were run, and {large} are",
        "shown as too large (Korthikanti et al., figure 1). The planner is right about"
        f" {right}, which are {right / len(decisions):.1%}. It is wrong about",
        "",
        *(f"- {one.what}: it says that it {'fits' if one.predicted else 'does not fit'}" for one in wrong),
        "",
        "Few of these jobs are too large, so this comparison mostly measures false refusals. For the other kind see",
        "[Out of memory](#out-of-memory).",
    ]
    return "\n".join(lines) + "\n"


def markdown(table: Table) -> str:
    """Format a table for docs/planner.md."""
    predicted = [row for row in table.rows if row.tolerance]
    within = sum(row.agrees for row in predicted)
    exact = sum(row.agrees for row in table.rows if not row.tolerance)
    lines = [f"## {table.title}", "", f"{table.source}. {table.note}".strip(), ""]
    if len(table.rows) > len(predicted):
        lines += [f"{exact} of {len(table.rows) - len(predicted)} calculated values are the printed ones.", ""]
    lines += [f"{within} of {len(predicted)} predictions are within their tolerance.", ""]
    lines += ["| | published | predicted | ratio | unit |", "|---|---|---|---|---|"]
    for row in table.rows:
        mark = "" if row.agrees else " (outside)"
        lines.append(
            f"| {row.what} | {row.published:,.{row.digits}f} | {row.predicted:,.{row.digits}f} |"
            f" {row.ratio:.2f}{mark} | {row.unit} |"
        )
    return "\n".join(lines) + "\n"


TABLES = """# The planner against published tables

The tables compare published values with predictions of [the planner](planner.md). `python docs/planner_tables.py`
writes this page. The tolerance is 10 % for memory and 20 % for times and rates; values that a formula gives must be
equal. The constants were fitted to several of these tables.
"""


def kinds_markdown() -> str:
    """Format the kinds of models that are counted for docs/planner.md."""
    kinds = ", ".join(f"`{kind}`" for kind in families())
    return f"## Kinds of models that are counted\n\n{len(families())} values of `model_type`: {kinds}.\n"


def document(page: str) -> str:
    """Return docs/planner.md, whose prose is written by hand, with its generated part as it is now."""
    before = page.partition(START)[0]
    return before + START + "\n" + "\n".join([summary_markdown(), fits_markdown(), kinds_markdown()])


def tables_document() -> str:
    """Return the content of docs/planner_tables.md."""
    return "\n".join([TABLES, *(markdown(table) for table in tables())])


def write(folder: Path) -> None:
    """Write the pages and the picture."""
    page = folder / "planner.md"
    page.write_text(document(page.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "planner_tables.md").write_text(tables_document(), encoding="utf-8")
    save(scatter(), folder / "pictures" / "planner.svg")


if __name__ == "__main__":
    write(Path(__file__).parent)
