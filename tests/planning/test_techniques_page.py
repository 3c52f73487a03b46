"""The formulas of docs/techniques.md, worked out by hand for one small job: they are what its trace counts.

Each case has the words of the page that it works out, so that a formula cannot change alone.
"""

from collections import Counter
from functools import cache
from math import ceil
from pathlib import Path

import pytest

from minidist.comm import SimWorld
from minidist.data import load_dataset
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from tests.cases import has_settings
from tests.jobs import sent_bytes

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "techniques.md").read_text(encoding="utf-8").split())
LAYERS, ROWS, LENGTH, WIDTH = 2, 2, 16, 32
JOB = {"data": "markov", "layers": LAYERS, "heads": 4, "width": WIDTH, "context": LENGTH, "micro_batch": ROWS}
ACTIVATION = 4 * ROWS * LENGTH * WIDTH  # b s h, in bytes
TOKENS = ROWS * LENGTH


def parameters():
    model = make_model(TrainConfig.make(**JOB, steps=1), load_dataset(JOB["data"]))
    return dict(model.named_parameters())


@cache
def psi(shards=0):
    """The bytes of the gradients; with shards each of ZeRO 3's units padded, and "whole" those of ZeRO 1 and 2."""
    sizes = Counter()
    for name, parameter in parameters().items():
        unit = name.split(".h.")[1].split(".")[0] if ".h." in name else "rest"
        sizes[unit] += parameter.size
    return 4 * sum(padded(size, shards) for size in sizes.values())


def padded(elements, shards):
    return ceil(elements / (1024 * shards)) * 1024 * shards if shards else elements


def whole(shards):
    return 4 * padded(psi() // 4, shards)


def sent(ranks, settings):
    """Bytes of each purpose that leave a rank in a step, on average over the ranks: a second step less a first."""
    bytes_of = []
    for steps in (1, 2):
        world = SimWorld(ranks)
        world.run(train, TrainConfig.make(**{"optimizer": "sgd", **JOB, **settings, "steps": steps}))
        bytes_of.append(sent_bytes(world))
    return {purpose: (bytes_of[1][purpose] - bytes_of[0][purpose]) / ranks for purpose in bytes_of[1]}


def split(t):
    """Bytes per pass of the split layers, and of the split embedding (forward) or head (backward)."""
    return (4 * LAYERS + 2) * (t - 1) / t * ACTIVATION


def replicated():
    """Bytes that sequence parallelism sums: layer norms, biases of rows, positions."""
    names = ("ln_", "c_proj.bias", "wpe")
    return 4 * sum(p.size for name, p in parameters().items() if any(part in name for part in names))


MATRICES = 4 * 24_576  # of the blocks
CASES = {
    "data parallel": ("| 2 (n-1)/n Ψ |", 3, {"dp": 3}, lambda: {"gradient_reduce": 4 / 3 * psi()}),
    "accumulation": ("| 2 (n-1)/n Ψ |", 2, {"dp": 2, "accumulation": 2}, lambda: {"gradient_reduce": psi()}),
    "ZeRO 1": (
        "stage 1: 2 (n-1)/n Ψ",
        3,
        {"dp": 3, "zero": 1, "accumulation": 2},
        lambda: {"gradient_reduce": 2 / 3 * whole(3), "parameter_gather": 2 / 3 * whole(3)},
    ),
    "ZeRO 2": (
        "stage 2: (k+1) (n-1)/n Ψ",
        3,
        {"dp": 3, "zero": 2, "accumulation": 2},
        lambda: {"gradient_reduce": 2 * 2 / 3 * whole(3), "parameter_gather": 2 / 3 * whole(3)},
    ),
    "ZeRO 3": (
        "3 k (n-1)/n Ψ",
        3,
        {"dp": 3, "zero": 3, "accumulation": 2},
        lambda: {"gradient_reduce": 2 * 2 / 3 * psi(3), "parameter_gather": 2 * 2 * 2 / 3 * psi(3)},
    ),
    "hybrid sharding": (
        "c copies on n = c g ranks: 3 k (g-1)/g Ψ + 2 k (c-1)/c Ψ/g",
        6,
        {"dp": 6, "zero": 3, "dp_replicate": 3},
        lambda: {"gradient_reduce": psi(2) / 2 + 4 / 3 * psi(2) / 2, "parameter_gather": 2 * psi(2) / 2},
    ),
    "Muon everywhere": (
        "or (n-1)/n of them everywhere",
        3,
        {"dp": 3, "zero": 1, "optimizer": "muon", "momentum": 0.95, "orthogonalize": "everywhere"},
        lambda: {"muon": 2 / 3 * MATRICES},
    ),
    "noise scale": (
        "2 (n-1)/n of 8 B per step, or of 16 B where gradients are sharded",
        4,
        {"dp": 4, "zero": 1, "noise_scale": True},
        lambda: {"metrics": 8 * 3 + 2 * 3 / 4 * 16},  # the first number is that of the reported loss
    ),
    "the reported loss": ("8 (n-1) B per micro-batch", 3, {"dp": 3, "accumulation": 2}, lambda: {"metrics": 2 * 16}),
    "tensor parallel": (
        "8 b s h (t-1)/t elements per layer; 4 b s h (t-1)/t of the split embedding and head, 2 (t-1)/t of 3 numbers"
        " per token of the loss",
        4,
        {"tp": 4},
        lambda: {"tensor_forward": split(4) + 2 * 3 / 4 * 3 * TOKENS * 4, "tensor_backward": split(4)},
    ),
    "sequence parallel": (
        "2 b s h (t-1)/t more per layer, b s h (t-1)/t more for the head",
        4,
        {"tp": 4, "sequence_parallel": True},
        lambda: {
            "regather": 2 * (LAYERS + 0.5) * 3 / 4 * ACTIVATION,
            "tensor_backward": split(4) + 2 * 3 / 4 * replicated(),
        },
    ),
    "experts": (
        "4 (P-1)/P k c N h elements per layer",
        2,
        {"dp": 2, "ep": 2, "experts": 4},
        lambda: {"dispatch": 4 / 2 * 1.25 * ACTIVATION * LAYERS},
    ),
    "ring attention": (
        "ring 2 (P-1) N h / P forward, 2 (2 P-1) N h / P backward",
        4,
        {"cp": 4, "attention": "ring"},
        lambda: {
            "tensor_forward": 2 * 3 / 4 * ACTIVATION * LAYERS,
            "tensor_backward": 2 * 7 / 4 * ACTIVATION * LAYERS,
            "gradient_reduce": 2 * 3 / 4 * psi(),
        },
    ),
    "Ulysses": (
        "Ulysses 4 (P-1) N h / P² each way",
        4,
        {"cp": 4, "attention": "ulysses"},
        lambda: dict.fromkeys(("tensor_forward", "tensor_backward"), 4 * 3 / 16 * ACTIVATION * LAYERS),
    ),
    "all-gather attention": (
        "2 (P-1) N h / P forward, as many backward",
        4,
        {"cp": 4, "attention": "all-gather"},
        lambda: dict.fromkeys(("tensor_forward", "tensor_backward"), 2 * 3 / 4 * ACTIVATION * LAYERS),
    ),
}


@pytest.mark.parametrize("name", [name for name, (_, _, settings, _) in CASES.items() if has_settings(settings)])
def test_a_formula_of_the_page_is_what_a_trace_counts(name):
    words, ranks, settings, formula = CASES[name]
    assert words in PAGE
    measured = sent(ranks, settings)
    for purpose, expected in formula().items():
        assert measured[purpose] == pytest.approx(expected, rel=1e-12), purpose


def test_the_example_of_the_page_is_the_job_of_this_file():
    """26,496 parameters, and with the padding of ZeRO on 2 ranks."""
    counts = (
        f"{psi() // 4:,} parameters has {whole(2) // 4:,} elements with ZeRO 1 and 2 on 2 ranks, and {psi(2) // 4:,}"
    )
    assert counts in PAGE
