"""LAMB: Adam's direction, with a step as long as the layer's weights; for large batches of text.

Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (ICLR 2020,
arXiv:1904.00962), algorithm 2, with phi(z) = z. DeepSpeed and some others also bound the ratio; the paper does not.
Proved by: tests/optim/test_layerwise.py
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from minidist.base.limits import check_number
from minidist.core.base import arrays as xp
from minidist.core.optim.adam import average_gradient
from minidist.core.optim.optimizer import Group, State
from minidist.optim.checks import check_betas
from minidist.optim.layerwise import LayerwiseOptimizer, Sums


class LAMB(LayerwiseOptimizer):
    """m and v as in Adam;  u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + decay p;  p -= lr |p| / |u| u.

    The norms are those of a whole layer; the ratio |p| / |u| is 1 where one of them is 0. State: "exp_avg" (m) and
    "exp_avg_sq" (v).
    """

    temporaries = 2
    settings = LayerwiseOptimizer.settings | {"betas": check_betas, "eps": partial(check_number, above=0)}

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        groups: Iterable[Group] = (),
        layer_sums: Callable[[Sums], Sums] | None = None,
    ) -> None:
        self.betas, self.eps = betas, eps
        super().__init__(parameters, lr, weight_decay, groups, layer_sums)

    def initial_state(self) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def measured(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], decay: float, count: int
    ) -> xp.Array:
        average_gradient(state, grad, self.betas, work[0])
        return self._direction(data, state, work, decay, count)

    def trust_ratio(self, weights: float, update: float, decay: float) -> float:
        return weights / update

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        # Computed again from m and v, which costs less than keeping an array as large as the layer.
        step = self._direction(data, state, work, decay, count)
        step *= lr
        data -= step

    def _direction(self, data: xp.Array, state: State, work: list[xp.Array], decay: float, count: int) -> xp.Array:
        """Return u of the class's formula, in `work[0]`."""
        # As in Adam: the corrections of both averages are one number, and eps is scaled instead of v.
        scale = math.sqrt(1 - self.betas[1] ** count)
        step, decayed = work
        xp.sqrt(state["exp_avg_sq"], out=step)
        step += self.eps * scale
        xp.divide(state["exp_avg"], step, out=step)
        step *= scale / (1 - self.betas[0] ** count)

        if decay:
            xp.multiply(data, decay, out=decayed)
            step += decayed
        return step
