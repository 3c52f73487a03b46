"""The models, batches and optimizer of the benchmarks, and our own training step on them.

Proved by: tests/bench/test_step.py
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.base.arrays import Device
from minidist.base.device import creating_on
from minidist.base.errors import UsageError, quoted
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base import arrays as xp
from minidist.core.nn import GPT, MLP, FlatParameters, GPTConfig, Module
from minidist.core.optim import AdamW
from minidist.report.bench.harness import Step, training_step

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


@dataclass(frozen=True)
class StepCase:
    """One workload: an MLP (`sizes`) or a GPT (`config`), the batch, and the goals of the ratio to PyTorch's step."""

    name: str
    batch: int
    target: float
    sizes: tuple[int, ...] = ()
    config: GPTConfig | None = None
    length: int = 0
    steps: int = 1  # steps per round: a round should take a few tenths of a second
    gpu_target: float = 1.3


CASES = {
    case.name: case
    for case in (
        StepCase("gpt", 8, 1.00, config=GPTConfig(256, 128, 256, 4, 8), length=128, steps=2),
        StepCase("gpt-512", 2, 1.00, config=GPTConfig(256, 512, 256, 4, 8), length=512, steps=2),
        StepCase("gpt-tiny", 4, 0.85, config=GPTConfig(256, 32, 64, 2, 4), length=32, steps=100),
        StepCase("mlp", 128, 0.80, sizes=(64, 256, 256, 10), steps=200),
    )
}
# GPT-2 small, whose operations are large enough to keep a GPU busy.
GPU_CASES = {
    "gpt2": StepCase("gpt2", 8, 1.00, config=GPTConfig(50304, 1024, 768, 12, 12), length=1024, steps=3, gpu_target=1.05)
}
GPT_CASES = [name for name, case in CASES.items() if case.config]


def gpt_case(name: str, bench: str) -> StepCase:
    """Return the GPT case of this name; UsageError when there is none."""
    if name not in GPT_CASES:
        raise UsageError(f"{bench}: no GPT case {quoted(name)}; one of {', '.join(GPT_CASES)}")
    return CASES[name]


def make_batch(case: StepCase, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return one batch of random inputs and targets."""
    rng = np.random.default_rng(seed)
    if case.config is None:
        inputs = rng.standard_normal((case.batch, case.sizes[0]), dtype=np.float32)
        return inputs, rng.integers(0, case.sizes[-1], case.batch)
    # One token more than the length: the targets are the inputs, shifted by one.
    tokens = rng.integers(0, case.config.vocab_size, (case.batch, case.length + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def make_model(case: StepCase, dtype: Any = np.float32) -> Module:
    """Return the model of a case."""
    return MLP(case.sizes, dtype=dtype) if case.config is None else GPT(case.config, dtype)


def own_step(case: StepCase, model: Module, device: Device | None = None) -> Step:
    """Return a closure that trains `model` by one step of AdamW on the case's batch; device: None is the host."""
    model.to(device)
    with creating_on(device):
        inputs, targets = (xp.to_device(rows) for rows in make_batch(case))
        # One flat array, so that AdamW is a few operations over all parameters.
        flat = FlatParameters(model.parameters())
        optimizer = AdamW(flat, **ADAMW)

    def loss_of() -> Any:
        return cross_entropy(model(Tensor(inputs)), targets) if case.config is None else model(inputs, targets)

    train = training_step([flat], loss_of, optimizer)

    def step() -> float:
        with creating_on(device):
            return train()

    return step
