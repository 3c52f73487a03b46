"""`AdamW` whose weight decay passes through the averages, as in the first paper: Adam with L2 regularisation.

Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization" (ICLR 2019), algorithm 2, line 6.
Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.optim.adam import AdamW
from minidist.core.optim.optimizer import Group, State


class Adam(AdamW):
    """g += decay p, and then the step of AdamW without decay."""

    temporaries = 2

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        groups: Iterable[Group] = (),
    ) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, groups)

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        # In a temporary: the gradient itself must stay as it is.
        if decay:
            total = work[1]
            xp.multiply(data, decay, out=total)
            total += grad
            grad = total
        super().update(data, grad, state, work, lr, 0.0, count)
