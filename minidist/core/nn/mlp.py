"""The multilayer perceptron: the smallest model on which every strategy can be understood and checked exactly.

Proved by: tests/nn/test_modules.py
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.nn.layers import Linear
from minidist.core.nn.module import Module, Sequential, run_blocks


class MLP(Module):
    """Linear layers of the given sizes with an activation after each but the last: MLP([64, 256, 256, 10]).

    Parameters are called "layers.0.weight", "layers.0.bias", ...
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str | None = "relu",
        bias: bool = True,
        dtype: Any = xp.float32,
        seed: int = 0,
    ) -> None:
        # Classes or values come out of the last layer, which has no activation.
        last = len(sizes) - 2
        self.layers = [
            Linear(n, m, bias, activation if i < last else None, dtype, seed=None)
            for i, (n, m) in enumerate(pairwise(sizes))
        ]
        self.initialize(seed)

    @property
    def blocks(self) -> list[Linear]:
        """The layers, in order: what a pipeline cuts between and FSDP shards one by one."""
        return self.layers

    def stage(self, first: int, last: int, is_first: bool, is_last: bool) -> Sequential:
        """Return layers first..last-1 as a stage of a pipeline."""
        return Sequential(*self.layers[first:last])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sizes[0]) -> (batch, sizes[-1])."""
        return run_blocks(self.layers, x)
