"""LARS: SGD with momentum, whose learning rate is scaled layer by layer; for large batches of images.

Source: Y. You, I. Gitman, B. Ginsburg, "Large batch training of convolutional networks" (2017, arXiv:1708.03888),
algorithm 1. As there, the rate is multiplied into the momentum buffer, where `SGD` (and PyTorch) multiplies the buffer
when it is read; the two differ when the rate changes.
Proved by: tests/optim/test_layerwise.py
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from minidist.base.limits import check_number
from minidist.core.base import arrays as xp
from minidist.core.optim.optimizer import Group, State
from minidist.optim.layerwise import LayerwiseOptimizer, Sums


class LARS(LayerwiseOptimizer):
    """ratio = eta |p| / (|g| + decay |p|);  b = momentum b + lr ratio (g + decay p);  p -= b.

    The norms are those of a whole layer; the ratio is 1 where |p| or |g| is 0. eta: `trust_coefficient`, how far a
    layer is trusted to move, as a share of its norm. State: "momentum_buffer" (b), only with momentum.
    """

    temporaries = 1
    settings = LayerwiseOptimizer.settings | {
        "momentum": partial(check_number, below=1),
        "trust_coefficient": partial(check_number, above=0),
    }

    def __init__(
        self,
        parameters: Any,
        lr: float = 1.0,
        momentum: float = 0.0,
        trust_coefficient: float = 1e-3,
        weight_decay: float = 0.0,
        groups: Iterable[Group] = (),
        layer_sums: Callable[[Sums], Sums] | None = None,
    ) -> None:
        self.momentum, self.trust_coefficient = momentum, trust_coefficient
        super().__init__(parameters, lr, weight_decay, groups, layer_sums)

    def initial_state(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if self.momentum else {}

    def measured(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], decay: float, count: int
    ) -> xp.Array:
        return grad

    def trust_ratio(self, weights: float, update: float, decay: float) -> float:
        return self.trust_coefficient * weights / (update + decay * weights)

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        # lr ratio (g + decay p); `lr` has the ratio already
        (step,) = work
        if decay:
            xp.multiply(data, decay, out=step)
            step += grad
            step *= lr
        else:
            xp.multiply(grad, lr, out=step)

        # b = momentum b + that, and p -= b
        if self.momentum:
            buffer = state["momentum_buffer"]
            buffer *= self.momentum
            buffer += step
            step = buffer
        data -= step
