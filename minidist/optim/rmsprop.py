"""RMSProp: Adagrad with a moving average instead of a sum, so that the learning rate does not fall to zero.

Sources: T. Tieleman and G. Hinton, "Lecture 6.5: rmsprop" (Neural networks for machine learning, 2012); A. Graves,
"Generating sequences with recurrent neural networks" (2013), equations 38 to 41, for the centered form with momentum.
Graves adds his epsilon inside the root; here it is PyTorch's `eps`, added to the root, the rate multiplies the momentum
buffer instead of going into it, and weight decay is added to the gradient.
Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from minidist.base.limits import check_flag, check_number
from minidist.core.base import arrays as xp
from minidist.core.optim.optimizer import Group, Optimizer, State


class RMSProp(Optimizer):
    """g += decay p;  s = alpha s + (1 - alpha) g^2;  u = g / (sqrt(s) + eps);  p -= lr u.

    Centered: the mean of g, m, is kept too, and the root is of s - m^2. With momentum: b = momentum b + u; p -= lr b.
    State: "square_avg", and when asked for "grad_avg" (centered) and "momentum_buffer".
    """

    temporaries = 2
    settings = Optimizer.settings | {
        "alpha": partial(check_number, below=1),
        "eps": partial(check_number, above=0),
        "momentum": partial(check_number, below=1),
        "centered": check_flag,
    }

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        groups: Iterable[Group] = (),
    ) -> None:
        self.alpha, self.eps, self.momentum, self.centered = alpha, eps, momentum, centered
        super().__init__(parameters, lr, weight_decay, groups)

    def initial_state(self) -> dict[str, float]:
        names = ["square_avg"]
        names += ["grad_avg"] if self.centered else []
        names += ["momentum_buffer"] if self.momentum else []
        return dict.fromkeys(names, 0.0)

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        # g += decay p, in a temporary: the gradient itself must stay as it is
        total, root = work
        if decay:
            xp.multiply(data, decay, out=total)
            total += grad
            grad = total

        # s = alpha s + (1 - alpha) g^2
        squares = state["square_avg"]
        squares *= self.alpha
        xp.square(grad, out=root)
        root *= 1 - self.alpha
        squares += root

        # root = sqrt(s), centered sqrt(s - m^2)
        if self.centered:
            mean = state["grad_avg"]
            mean *= self.alpha
            xp.multiply(grad, 1 - self.alpha, out=root)
            mean += root
            xp.square(mean, out=root)
            xp.subtract(squares, root, out=root)
            xp.sqrt(root, out=root)
        else:
            xp.sqrt(squares, out=root)

        # u = g / (root + eps), and with momentum b = momentum b + u
        root += self.eps
        xp.divide(grad, root, out=root)
        if self.momentum:
            buffer = state["momentum_buffer"]
            buffer *= self.momentum
            buffer += root
            xp.multiply(buffer, lr, out=root)
        else:
            root *= lr

        data -= root
