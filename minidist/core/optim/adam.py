"""AdamW: the usual choice for transformers, and the reason for ZeRO: two arrays of state per parameter.

Sources: D. Kingma and J. Ba, "Adam: a method for stochastic optimization" (ICLR 2015), algorithm 1, computed in the
order that the end of section 2 gives: alpha_t = lr sqrt(1 - beta2^t) / (1 - beta1^t) and an epsilon scaled by
sqrt(1 - beta2^t), which is the same update with one pass less. I. Loshchilov and F. Hutter, "Decoupled weight decay
regularization" (ICLR 2019), algorithm 2, where PyTorch's meaning is taken: the decay is multiplied by the learning
rate. `minidist/optim/adam.py` has Adam, whose decay passes through the averages.

Proved by: tests/optim/test_optimizers.py
"""

import math
from collections.abc import Iterable
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.optim.optimizer import Group, Optimizer, State


class AdamW(Optimizer):
    """p -= lr decay p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  with t = 1 in the first step

        p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).

    State: "exp_avg" (m) and "exp_avg_sq" (v).
    """

    settings = Optimizer.settings | dict.fromkeys(("betas", "eps"), hooks.checked_setting)

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        groups: Iterable[Group] = (),
    ) -> None:
        self.betas, self.eps = betas, eps
        super().__init__(parameters, lr, weight_decay, groups)

    def initial_state(self) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        # Algorithm 2, line 12: the decay multiplies the parameter itself, not the gradient
        if decay:
            data *= 1 - lr * decay

        # scale: sqrt(1 - beta2^t), which the step multiplies instead of every element of v
        beta1, beta2 = self.betas
        scale = math.sqrt(1 - beta2**count)
        alpha, eps = lr * scale / (1 - beta1**count), self.eps * scale
        if kernels := xp.kernels_of(data):
            kernels.adam(data, grad, state["exp_avg"], state["exp_avg_sq"], beta1, beta2, alpha, eps)
            return
        step = work[0]
        average_gradient(state, grad, self.betas, step)

        # p -= alpha_t m / (sqrt(v) + eps_t)
        xp.sqrt(state["exp_avg_sq"], out=step)
        step += eps
        xp.divide(state["exp_avg"], step, out=step)
        step *= alpha
        data -= step


def average_gradient(state: State, grad: xp.Array, betas: tuple[float, float], work: xp.Array) -> None:
    """Update the averages "exp_avg" (m) and "exp_avg_sq" (v) of a block in place; `work` is overwritten."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]

    # m = beta1 m + (1 - beta1) g
    mean *= betas[0]
    xp.multiply(grad, 1 - betas[0], out=work)
    mean += work

    # v = beta2 v + (1 - beta2) g^2
    square *= betas[1]
    xp.square(grad, out=work)
    work *= 1 - betas[1]
    square += work
