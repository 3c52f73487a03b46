"""The multilayer perceptron: the smallest model on which every strategy can be understood and checked exactly.

Proved by: tests/nn/test_modules.py
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.nn.layers import Linear
from minidist.core.nn.module import Sequential, run_blocks


class MLP(Sequential):
    """Linear layers of the given sizes with an activation after each but the last: MLP([64, 256, 256, 10]).

    A pipeline cuts between its layers, and FSDP shards them one by one.
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
        layers = [
            Linear(n, m, bias, activation if i < last else None, dtype, seed=None)
            for i, (n, m) in enumerate(pairwise(sizes))
        ]
        super().__init__(*layers)
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sizes[0]) -> (batch, sizes[-1])."""
        return run_blocks(self.layers, x)
