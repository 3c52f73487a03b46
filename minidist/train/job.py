"""From a config to the things that are trained: model, data, optimizer. The same on every rank and for the reference.

Nothing here depends on the number of ranks: weights depend on the seed and on names, a step's global batch on the seed and
the step. That is why one device and many can be compared at all.
"""

from dataclasses import dataclass
from typing import Any

from minidist.autograd import Tensor, cross_entropy
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.data import GlobalBatchSampler, load_dataset
from minidist.nn import GPT, MLP, GPTConfig, Module
from minidist.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp, WarmupCosine
from minidist.optim.schedule import Warmup
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


def build(config: TrainConfig, batches: Batches) -> Job:
    """Everything for one rank, from a config that `check` has passed."""
    dataset = load_dataset(config.data)
    sampler = GlobalBatchSampler(dataset, batches.global_batch, config.context, config.seed)
    model = _model(config, dataset)
    return Job(config, batches, model, DTYPES[config.precision], _schedule(config), sampler)


def check(config: TrainConfig) -> None:
    """Raise UsageError when data, model and optimizer do not fit together: said once, before any rank starts."""
    dataset = load_dataset(config.data)
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
    dataset.samples(config.context)
    _schedule(config)


def _model(config: TrainConfig, dataset: Any) -> Module:
    dtype = DTYPES[config.precision]
    if config.model == "gpt":
        sizes = GPTConfig(dataset.vocab_size, config.context, config.width, config.layers, config.heads, config.dropout)
        return GPT(sizes, dtype=dtype, seed=config.seed)
    return MLP([dataset.features, *[config.width] * config.layers, dataset.classes], dtype=dtype, seed=config.seed)


def optimizer_class(config: TrainConfig) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class and its settings."""
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer in ("sgd", "rmsprop"):
        settings["momentum"] = config.momentum
    return {"sgd": SGD, "adagrad": Adagrad, "rmsprop": RMSProp, "adam": Adam, "adamw": AdamW}[config.optimizer], settings


def make_optimizer(config: TrainConfig, parameters: Any) -> Optimizer:
    """The optimizer on a FlatParameters or on slices."""
    kind, settings = optimizer_class(config)
    return kind(parameters, **settings)  # type: ignore[no-any-return]


def _schedule(config: TrainConfig) -> Any:
    if config.decay == "cosine":
        return WarmupCosine(config.warmup, config.steps)
    return Warmup(config.warmup)
