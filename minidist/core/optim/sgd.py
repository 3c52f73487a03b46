"""Stochastic gradient descent, plain and with momentum: the baseline, and the method with the least state.

Momentum is one array as large as the parameters. Source: B. Polyak, "Some methods of speeding up the convergence of
iteration methods" (1964), the heavy ball.

Where they differ this is PyTorch's `torch.optim.SGD`: the learning rate multiplies the whole buffer at each step (the
paper folds it into the buffer, which differs when the rate changes), the buffer starts as the first gradient, and
weight decay is added to the gradient. `minidist/optim/sgd.py` adds dampening and Nesterov's form.
Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.optim.optimizer import Group, Optimizer, State


class SGD(Optimizer):
    """g += decay p;  b = momentum b + g;  p -= lr b.

    State: "momentum_buffer", only with momentum.
    """

    temporaries = 2
    settings = Optimizer.settings | {"momentum": hooks.checked_setting}

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        groups: Iterable[Group] = (),
    ) -> None:
        self.momentum = momentum
        super().__init__(parameters, lr, weight_decay, groups)

    def initial_state(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if self.momentum else {}

    def update(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        # g += decay p, in a temporary: the gradient itself must stay as it is
        total, product = work
        if decay:
            xp.multiply(data, decay, out=total)
            total += grad
            grad = total

        # p -= lr g, or lr b with momentum
        if self.momentum:
            grad = self.average(grad, state["momentum_buffer"], product, count)
        xp.multiply(grad, lr, out=product)
        data -= product

    def average(self, grad: xp.Array, buffer: xp.Array, product: xp.Array, count: int) -> xp.Array:
        """b = momentum b + g, or g in the first step; returns what takes the place of g. `product` may be used."""
        if count == 1:
            xp.copyto(buffer, grad)
        else:
            buffer *= self.momentum
            buffer += grad
        return buffer
