"""Adagrad: a learning rate per element that falls with the squares of its gradients, for sparse features.

Source: J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and stochastic optimization"
(JMLR 12, 2011), the diagonal form of algorithm 1 (composite mirror descent without a regulariser). The paper puts its
delta inside the sum; here it is PyTorch's `eps` added to the root, and weight decay is added to the gradient.
Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from minidist.base.limits import check_number
from minidist.core.base import arrays as xp
from minidist.core.optim.optimizer import Group, Optimizer, State


class Adagrad(Optimizer):
    """g += decay p;  s += g^2;  p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps), where t = 1 in the first step.

    State: "sum".
    """

    temporaries = 2
    settings = Optimizer.settings | {
        "lr_decay": check_number,
        "initial_accumulator_value": check_number,
        "eps": partial(check_number, above=0),
    }

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        groups: Iterable[Group] = (),
    ) -> None:
        self.lr_decay, self.eps = lr_decay, eps
        self.initial_accumulator_value = initial_accumulator_value
        super().__init__(parameters, lr, weight_decay, groups)

    def initial_state(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        # g += decay p, in a temporary: the gradient itself must stay as it is
        total, root = work
        if decay:
            xp.multiply(data, decay, out=total)
            total += grad
            grad = total

        # s += g^2
        squares = state["sum"]
        xp.square(grad, out=root)
        squares += root

        # p -= lr_t g / (sqrt(s) + eps)
        xp.sqrt(squares, out=root)
        root += self.eps
        xp.divide(grad, root, out=root)
        root *= lr / (1 + (count - 1) * self.lr_decay)
        data -= root
