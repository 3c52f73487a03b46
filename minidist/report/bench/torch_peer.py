"""PyTorch's side of the benchmarks: the same model with the same weights, and its best eager step.

Imports torch, so the benchmarks import this module only when a comparison is asked for. The settings are PyTorch's
fastest on a CPU and eager on a GPU: scaled_dot_product_attention, fused AdamW, one thread.

Proved by: tests/nn/test_against_torch.py, tests/bench/test_step.py
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from minidist.core.base.errors import UsageError
from minidist.core.nn import GPTConfig, Module
from minidist.report.bench.harness import Step, training_step
from minidist.report.bench.workloads import ADAMW, StepCase, make_batch


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is (inputs, outputs)."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, m))
        self.bias = nn.Parameter(torch.zeros(m))

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal self-attention with a fused Q|K|V."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads = Conv1D(c.n_embd, 3 * c.n_embd), Conv1D(c.n_embd, c.n_embd), c.n_head

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        # (batch, heads, length, width / heads)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.c_attn(x).split(width, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """The block's MLP."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(c.n_embd, 4 * c.n_embd), Conv1D(4 * c.n_embd, c.n_embd)

    def forward(self, x: Any) -> Any:
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon), FeedForward(c)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings, blocks and the last norm."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.n_positions, c.n_embd)
        self.h = nn.ModuleList([Block(c) for _ in range(c.n_layer)])
        self.ln_f = nn.LayerNorm(c.n_embd, c.layer_norm_epsilon)

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Twin(nn.Module):
    """The GPT with a tied head."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.transformer = Transformer(c)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        # The head is the embedding's weight: one parameter with two uses.
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Any) -> Any:
        return self.lm_head(self.transformer(tokens))


class TwinMLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n, m) for n, m in pairwise(sizes)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        return self.layers[-1](x)


def torch_twin(case: StepCase, model: Module, dtype: Any = torch.float32) -> Any:
    """Return a torch.nn.Module of the same architecture, with the same parameter names and a copy of the weights."""
    twin: Any = TwinMLP(case.sizes) if case.config is None else Twin(case.config)
    twin = twin.to(dtype)
    # A copy, because from_numpy shares memory with our weights.
    twin.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in model.state_dict().items()})
    return twin


def torch_adamw(parameters: Any) -> Any:
    """Return PyTorch's fastest AdamW, with the settings of `own_step`."""
    return torch.optim.AdamW(parameters, fused=True, **ADAMW)


def check_cuda() -> None:
    """Raise UsageError where PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        raise UsageError(
            f"bench step --device cuda: PyTorch {torch.__version__} sees no GPU; install its build for CUDA, or give"
            " --against none"
        )


def torch_training(case: StepCase, module: Any, optimizer: Any, seed: int = 0) -> Step:
    """Return a closure that trains a PyTorch module, wrapped or not, by one step on one thread, where it lies."""
    torch.set_num_threads(1)
    # The same batch as ours; features in the dtype of the module.
    there = next(module.parameters()).device
    inputs, targets = (torch.from_numpy(a).to(there) for a in make_batch(case, seed))
    if inputs.is_floating_point():
        inputs = inputs.to(next(module.parameters()).dtype)

    def loss_of() -> Any:
        logits = module(inputs)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    return training_step([optimizer], loss_of, optimizer)


def torch_step(case: StepCase, model: Module, device: str = "cpu") -> Step:
    """Return PyTorch's step from the same weights (copied), on a device: cpu or cuda."""
    twin = torch_twin(case, model).to(device)
    return torch_training(case, twin, torch_adamw(twin.parameters()))
