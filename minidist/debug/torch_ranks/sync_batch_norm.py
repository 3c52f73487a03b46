"""SyncBatchNorm on the CPU, for which PyTorch has kernels on a GPU only: its messages stay those of PyTorch.

PyTorch's own function gathers mean, inverse deviation and count of all ranks forward, and adds two sums over the ranks
backward. The five kernels between the messages are written here with tensors of shape (batch, channels, ...).

Proved by: tests/torch_ranks/test_cuda.py
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as Function

original = nn.SyncBatchNorm.forward


def forward(module: Any, input: Tensor) -> Tensor:
    """Take the place of SyncBatchNorm.forward: on the CPU it synchronizes, too."""
    group = module.process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if not module.training or group is None or dist.get_world_size(group) == 1 or input.device.type != "cpu":
        return original(module, input)
    factor, means, variances = module.momentum, None, None
    if module.track_running_stats:
        module.num_batches_tracked.add_(1)
        means, variances = module.running_mean, module.running_var
        factor = 1.0 / module.num_batches_tracked.item() if factor is None else factor
    arguments = (module.weight, module.bias, means, variances, module.eps, factor or 0.0)
    return Function.apply(input, *arguments, group, dist.get_world_size(group))


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and inverse deviation of each channel."""
    axes = _axes(input)
    return input.mean(axes), (input.var(axes, unbiased=False) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor, mean: Tensor, invstd: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Return mean and inverse deviation of all ranks' channels from those of each, (ranks, channels)."""
    momentum, eps, counts = rest
    share = (counts / counts.sum()).unsqueeze(1)
    whole_mean = (share * mean).sum(0)
    variance = (share * (invstd**-2 - eps + (mean - whole_mean) ** 2)).sum(0)
    if running_mean is not None and running_var is not None:
        unbiased = variance * (counts.sum() / (counts.sum() - 1))
        running_mean.mul_(1 - momentum).add_(momentum * whole_mean)
        running_var.mul_(1 - momentum).add_(momentum * unbiased)
    return whole_mean, (variance + eps).rsqrt()


def batch_norm_elemt(input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """Return the normalized input."""
    normal = (input - _wide(mean, input)) * _wide(invstd, input)
    return normal if weight is None else normal * _wide(weight, input) + _wide(bias, input)


def batch_norm_backward_reduce(
    gradient: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sums of the gradient, and of its product with the centred input; the gradients of weight and bias."""
    axes = _axes(input)
    total = gradient.sum(axes)
    product = (gradient * (input - _wide(mean, input))).sum(axes)
    return total, product, product * invstd, total


def batch_norm_backward_elemt(
    gradient: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *sums: Tensor
) -> Tensor:
    """Return the gradient of the input from the sums of all ranks and their counts."""
    total, product, counts = sums
    number = counts.sum()
    centred = (input - _wide(mean, input)) * _wide(invstd**2 * product / number, input)
    scale = invstd if weight is None else invstd * weight
    return (gradient - _wide(total / number, input) - centred) * _wide(scale, input)


def _axes(input: Tensor) -> list[int]:
    return [axis for axis in range(input.dim()) if axis != 1]


def _wide(values: Tensor, input: Tensor) -> Tensor:
    """Return values of channels in the shape that goes with the input's."""
    return values.reshape(1, -1, *[1] * (input.dim() - 2))


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
