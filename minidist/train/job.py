"""From a config to the things that are trained: model, data, optimizer. The same on every rank and for the reference.

Nothing here depends on the number of ranks: weights depend on the seed and on names, a step's global batch on the seed and
the step. That is why one device and many can be compared at all.
"""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from minidist.autograd import Tensor, cross_entropy
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.comm import Comm
from minidist.data import GlobalBatchSampler, load_dataset
from minidist.nn import GPT, MLP, GPTConfig, Module
from minidist.nn.recompute import recompute
from minidist.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, WarmupCosine
from minidist.optim.schedule import Warmup
from minidist.parallel import HostCopy, HostPool, OffloadedOptimizer
from minidist.train.config import Batches, TrainConfig

DTYPES = {"fp32": xp.float32, "fp64": xp.float64}


@dataclass
class Job:
    """One rank's (or the reference's) model and data; a strategy adds flat parameters and the optimizer."""

    config: TrainConfig
    batches: Batches
    model: Module
    dtype: Any
    schedule: Any  # step -> factor of the learning rate
    sampler: GlobalBatchSampler
    pool: HostPool | None = None  # host memory, when something is offloaded

    def loss(self, step: int, number: int, model: Any = None) -> Tensor:
        """Loss of micro-batch `number` of a step: its share of the global mean (the divisor is the global count)."""
        first = number * self.batches.micro_batch
        inputs, targets = self.sampler.batch(step, first, self.batches.micro_batch)
        return self.loss_of((model or self.model)(as_input(inputs, self.dtype)), targets)

    def loss_of(self, outputs: Tensor, targets: Any) -> Tensor:
        """A micro-batch's share of the global mean, from the model's outputs."""
        divisor = float(self.batches.global_batch * (self.config.context if self.config.model == "gpt" else 1))
        return cross_entropy(outputs, targets, divisor)


def as_input(inputs: Any, dtype: Any) -> Any:
    """Tokens as they are; features as a tensor of the model's dtype."""
    return inputs if inputs.dtype.kind in "iu" else Tensor(xp.as_array(inputs, dtype))


def build(config: TrainConfig, batches: Batches, comm: Comm | None = None) -> Job:
    """Everything for one rank, from a config that `check` has passed. comm: whose host memory offloading uses."""
    pool = None if comm is None or config.offload == "none" else HostPool(comm)
    pack = partial(HostCopy, pool=pool) if pool is not None and config.offload == "activations" else None
    dataset = load_dataset(config.data)
    sampler = GlobalBatchSampler(dataset, batches.global_batch, config.context, config.seed)
    # A pipeline runs a whole stage's forward again, as its plan says; nothing inside the stage does.
    model = recompute(_model(config, dataset), "none" if config.pp > 1 else config.recompute, pack)
    return Job(config, batches, model, DTYPES[config.precision], _schedule(config), sampler, pool)


def check(config: TrainConfig, processes_here: int = 1) -> None:
    """Raise UsageError when data, model and optimizer do not fit together: said once, before any rank starts.

    processes_here: ranks that share this process's memory; a model that cannot fit is refused with its size.
    """
    dataset = load_dataset(config.data)
    needed = _parameters(config) * 4 * 4 * processes_here  # weights, gradients and Adam's two, 4 bytes each
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    if memory is not None and needed > memory:
        raise UsageError(
            f"{_parameters(config):,} parameters on {processes_here:,} ranks in this process need about {needed / 1e9:,.0f} GB "
            f"and this machine has {memory / 1e9:,.0f} GB; use fewer --layers, a smaller --width or fewer ranks"
        )
    if config.model == "gpt" and not dataset.is_tokens:
        raise UsageError(f"--data {config.data} holds samples with labels, not tokens; train it with --model mlp")
    if config.model == "mlp" and dataset.is_tokens:
        raise UsageError(f"--data {config.data} holds tokens, not samples with labels; train it with --model gpt")
    if config.model == "gpt" and config.width % config.heads:
        divisors = [h for h in range(1, config.width + 1) if config.width % h == 0]
        below = max(h for h in divisors if h < config.heads)
        above = min((h for h in divisors if h > config.heads), default=config.width)
        raise UsageError(
            f"--width {config.width} is not a multiple of --heads {config.heads}; try --heads {below} or --heads {above}"
        )
    if config.momentum and config.optimizer not in ("sgd", "rmsprop"):
        raise UsageError(
            f"--momentum {config.momentum} has no meaning for --optimizer {config.optimizer}; it belongs to sgd and rmsprop"
        )
    if config.recompute == "selective" and config.model == "mlp":
        raise UsageError("--recompute selective is for attention, which an MLP does not have; use --recompute full")
    if config.offload == "activations" and config.recompute != "full":
        raise UsageError(
            f"--offload activations keeps the inputs of recomputed blocks on the host, so it needs --recompute full, not {config.recompute}"
        )
    dataset.samples(config.context)
    _schedule(config)


def _parameters(config: TrainConfig) -> int:
    """About how many parameters a model has."""
    width, inner = config.width, 12 if config.model == "gpt" else 1
    return config.layers * inner * width * width + (256 + config.context) * width


def _model(config: TrainConfig, dataset: Any) -> Module:
    dtype = DTYPES[config.precision]
    if config.model == "gpt":
        sizes = GPTConfig(dataset.vocab_size, config.context, config.width, config.layers, config.heads, config.dropout)
        return GPT(sizes, dtype=dtype, seed=config.seed)
    return MLP([dataset.features, *[config.width] * config.layers, dataset.classes], dtype=dtype, seed=config.seed)


def optimizer_class(job: Job) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class (or what builds it on the host) and its settings."""
    config = job.config
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer in ("sgd", "rmsprop"):
        settings["momentum"] = config.momentum
    kind = {"sgd": SGD, "adagrad": Adagrad, "rmsprop": RMSProp, "adam": Adam, "adamw": AdamW}[config.optimizer]
    if job.pool is not None and config.offload == "optimizer":
        return partial(OffloadedOptimizer, optimizer_class=kind, pool=job.pool), settings
    return kind, settings


def make_optimizer(job: Job, parameters: Any) -> Optimizer:
    """The optimizer on a FlatParameters or on slices."""
    kind, settings = optimizer_class(job)
    return kind(parameters, **settings)  # type: ignore[no-any-return]


def _schedule(config: TrainConfig) -> Any:
    if config.decay == "cosine":
        return WarmupCosine(config.warmup, config.steps)
    return Warmup(config.warmup)
