"""How fast is a training step, beside PyTorch's on the same machine: the same model, weights, batches and optimizer.

The two sides run interleaved in one process, one round each in turn, and a round's *ratio* is own time over PyTorch's
(below 1 we are faster); the median over rounds is reported. Before any ratio the losses of both sides are compared,
because a fast wrong step is worth nothing. PyTorch runs its best eager settings: scaled_dot_product_attention and
fused AdamW. Which BLAS kernel each side uses decides much, so the environment is part of the answer. PyTorch is
imported only here, and only when a comparison is asked for.
"""

import gc
import importlib.util
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from minidist.autograd import Tensor, cross_entropy
from minidist.base.errors import MinidistError, UsageError, nearest
from minidist.base.process import tune_process
from minidist.nn import GPT, MLP, FlatParameters, GPTConfig, Module
from minidist.optim import AdamW

Step = Callable[[], float]  # one training step; returns the loss


@dataclass(frozen=True)
class StepCase:
    """One workload: an MLP (`sizes`) or a GPT (`config`), the batch, and the ratio that we aim for."""

    name: str
    batch: int
    target: float
    sizes: tuple[int, ...] = ()
    config: GPTConfig | None = None
    length: int = 0
    steps: int = 1  # steps a round: a round should take a few tenths of a second


CASES = {
    case.name: case
    for case in (
        StepCase("gpt", 8, 0.95, config=GPTConfig(256, 128, 256, 4, 8), length=128, steps=2),
        StepCase("gpt-512", 2, 1.0, config=GPTConfig(256, 512, 256, 4, 8), length=512, steps=2),
        StepCase("gpt-tiny", 4, 0.90, config=GPTConfig(256, 32, 64, 2, 4), length=32, steps=100),
        StepCase("mlp", 128, 0.90, sizes=(64, 256, 256, 10), steps=200),
    )
}


def make_batch(case: StepCase, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One batch of random inputs and targets."""
    rng = np.random.default_rng(seed)
    if case.config is None:
        inputs = rng.standard_normal((case.batch, case.sizes[0]), dtype=np.float32)
        return inputs, rng.integers(0, case.sizes[-1], case.batch)
    tokens = rng.integers(0, case.config.vocab_size, (case.batch, case.length + 1))
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def make_model(case: StepCase, dtype: Any = np.float32) -> Module:
    """The model of a case."""
    return MLP(case.sizes, dtype=dtype) if case.config is None else GPT(case.config, dtype)


def own_step(case: StepCase, model: Module) -> Step:
    """A closure that trains `model` by one step of AdamW on the case's batch."""
    inputs, targets = make_batch(case)
    flat = FlatParameters(model.parameters())
    optimizer = AdamW(flat, lr=1e-3, weight_decay=0.01)

    def step() -> float:
        flat.zero_grad()
        loss = cross_entropy(model(Tensor(inputs)), targets) if case.config is None else model(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def torch_step(case: StepCase, model: Module) -> Step:
    """The same step by PyTorch, from the same weights (copied)."""
    twin = torch_twin(case, model)
    return torch_training(case, twin, torch_adamw(twin.parameters()))


def torch_adamw(parameters: Any, **settings: Any) -> Any:
    """PyTorch's fastest AdamW, with the settings of `own_step`."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=True, **settings)


def torch_training(case: StepCase, module: Any, optimizer: Any, seed: int = 0) -> Step:
    """A closure that trains a PyTorch module, wrapped or not, by one step; on one thread."""
    import torch

    torch.set_num_threads(1)
    inputs, targets = (torch.from_numpy(a) for a in make_batch(case, seed))
    if inputs.is_floating_point():
        inputs = inputs.to(next(module.parameters()).dtype)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = module(inputs)
        loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def torch_twin(case: StepCase, model: Module, dtype: Any = None) -> Any:
    """A torch.nn.Module of the same architecture with the same parameter names and a copy of the weights."""
    import torch
    from torch import nn

    functional = nn.functional

    class Conv1D(nn.Module):
        def __init__(self, n: int, m: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(n, m))
            self.bias = nn.Parameter(torch.zeros(m))

        def forward(self, x: Any) -> Any:
            return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)

    class Attention(nn.Module):
        def __init__(self, c: GPTConfig) -> None:
            super().__init__()
            self.c_attn, self.c_proj, self.heads = Conv1D(c.n_embd, 3 * c.n_embd), Conv1D(c.n_embd, c.n_embd), c.n_head

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            q, k, v = (
                t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(width, dim=2)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))

    class FeedForward(nn.Module):
        def __init__(self, c: GPTConfig) -> None:
            super().__init__()
            self.c_fc, self.c_proj = Conv1D(c.n_embd, 4 * c.n_embd), Conv1D(4 * c.n_embd, c.n_embd)

        def forward(self, x: Any) -> Any:
            return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))

    class Block(nn.Module):
        def __init__(self, c: GPTConfig) -> None:
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon), Attention(c)
            self.ln_2, self.mlp = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon), FeedForward(c)

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Transformer(nn.Module):
        def __init__(self, c: GPTConfig) -> None:
            super().__init__()
            self.wte = nn.Embedding(c.vocab_size, c.n_embd)
            self.wpe = nn.Embedding(c.n_positions, c.n_embd)
            self.h = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
            self.ln_f = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon)

        def forward(self, tokens: Any) -> Any:
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.h:
                x = block(x)
            return self.ln_f(x)

    class Twin(nn.Module):
        def __init__(self, c: GPTConfig) -> None:
            super().__init__()
            self.transformer = Transformer(c)
            self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
            self.lm_head.weight = self.transformer.wte.weight

        def forward(self, tokens: Any) -> Any:
            return self.lm_head(self.transformer(tokens))

    class TwinMLP(nn.Module):
        def __init__(self, sizes: tuple[int, ...]) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(n, m) for n, m in pairwise(sizes)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers[:-1]:
                x = functional.relu(layer(x))
            return self.layers[-1](x)

    twin: Any = TwinMLP(case.sizes) if case.config is None else Twin(case.config)
    twin = twin.to(dtype or torch.float32)
    twin.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in model.state_dict().items()})
    return twin


def environment(with_torch: bool = True) -> dict[str, Any]:
    """What decides a timing: processor, thread counts, BLAS libraries and the kernels that they chose."""
    import threadpoolctl

    result: dict[str, Any] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE"),
        "threadpools": [
            {key: pool.get(key) for key in ("internal_api", "version", "architecture", "num_threads")}
            for pool in threadpoolctl.threadpool_info()
        ],
    }
    if with_torch:
        import torch

        result["torch"] = torch.__version__
        result["torch_capability"] = torch.backends.cpu.get_cpu_capability()
        result["torch_threads"] = torch.get_num_threads()
        result["torch_mkl"] = torch.backends.mkl.is_available()
    return result


def compare_case(case: StepCase, rounds: int = 8, checked_steps: int = 3, tolerance: float = 2e-4) -> dict[str, Any]:
    """Time one case; {name, ratio, median_s, torch_median_s, best_ratio, rounds, target, faults_per_step, losses}.

    Without torch there is no other side: ratio, torch_median_s and best_ratio are None.

    The losses of the first `checked_steps` steps must agree to `tolerance` (they warm both sides up, too); otherwise
    MinidistError, and no ratio.
    """
    model = make_model(case)
    sides = {"own": own_step(case, model)}
    if importlib.util.find_spec("torch") is not None:
        sides = {"own": sides["own"], "torch": torch_step(case, make_model(case))}
    losses = [tuple(step() for step in sides.values()) for _ in range(checked_steps)]
    for i, values in enumerate(losses):
        if not all(abs(value - values[0]) <= tolerance * max(1, abs(value)) for value in values):
            raise MinidistError(
                f"bench step {case.name}: the loss of step {i} is {values[0]}, PyTorch's is {values[1]}; no ratio is"
                " given"
            )
    times, faults = interleave(sides, case.steps, rounds)
    own, other = times["own"], times.get("torch")
    return {
        "name": case.name,
        "ratio": statistics.median(a / b for a, b in zip(own, other, strict=True)) if other else None,
        "median_s": statistics.median(own),
        "torch_median_s": statistics.median(other) if other else None,
        "best_ratio": min(own) / min(other) if other else None,
        "rounds": rounds,
        "target": case.target,
        "faults_per_step": faults / case.steps,
        "losses": losses,
    }


def interleave(sides: dict[str, Step], steps: int, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds a step of each side in each round, and the minor page faults of our last round."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    faults = 0
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                step = sides[side]
                step()
                before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
                for _ in range(steps):
                    step()
                times[side].append((time.perf_counter() - start) / steps)
                if side == "own":
                    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        gc.enable()
    return times, faults


def tape_microseconds(count: int = 2000, repeats: int = 9) -> dict[str, float]:
    """Microseconds for recording, and for recording and backward, of one operation on four numbers; minima over
    repeats."""
    other = Tensor(np.ones(4, np.float32))
    forward, both = [], []
    gc.disable()
    for _ in range(repeats):
        y = Tensor(np.ones(4, np.float32), requires_grad=True)
        start = time.perf_counter()
        for _ in range(count):
            y = y + other
        middle = time.perf_counter()
        y.backward(np.ones(4, np.float32))
        forward.append(middle - start)
        both.append(time.perf_counter() - start)
    gc.enable()
    return {"forward_us": min(forward) / count * 1e6, "forward_backward_us": min(both) / count * 1e6}


def rows(names: list[str] | None = None, rounds: int = 8) -> Iterator[dict[str, Any]]:
    """One result of `compare_case` after the other, so that a caller can print as they come."""
    for name in names or list(CASES):
        if name not in CASES:
            raise UsageError(f"bench step: no case {name!r}{nearest(name, CASES)}; one of {', '.join(CASES)}")
    for name in names or list(CASES):
        yield compare_case(CASES[name], rounds)


def bench_step(names: list[str] | None = None, rounds: int = 8) -> dict[str, Any]:
    """{"environment": ..., "rows": [...]} of the named cases (all when None). At least 6 rounds."""
    if rounds < 6:
        raise UsageError(f"bench step: {rounds} rounds are too few for a median of ratios; use at least 6")
    tuned = tune_process()
    results = list(rows(names, rounds))
    with_torch = importlib.util.find_spec("torch") is not None
    return {"environment": {**environment(with_torch), "process": tuned, "tape": tape_microseconds()}, "rows": results}


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(bench_step(sys.argv[1:] or None), indent=1))
