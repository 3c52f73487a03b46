"""Stochastic gradient descent, plain and with momentum: the baseline, and the method with the least state.

Plain SGD, w -= lr g, has no state; momentum, v = mu v + g and w -= lr v, is one array as large as the parameters.
Sources: B. Polyak, "Some methods of speeding up the convergence of iteration methods" (1964), the heavy ball; I.
Sutskever et al., "On the importance of initialization and momentum in deep learning" (ICML 2013), section 2, Nesterov.

Where the sources differ, `SGD` is PyTorch's `torch.optim.SGD`: the learning rate multiplies the whole buffer at each
step (the paper folds it into the buffer, which differs when the rate changes), the buffer starts as the first gradient,
and weight decay is added to the gradient.

Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.optim.optimizer import Group, Optimizer, State


class SGD(Optimizer):
    """g += decay p;  b = momentum b + (1 - dampening) g;  g = b (Nesterov: g + momentum b);  p -= lr g.

    State: "momentum_buffer", only with momentum; it begins as the first gradient, without dampening.
    """

    temporaries = 2
    settings = Optimizer.settings | dict.fromkeys(("momentum", "dampening", "nesterov"), hooks.checked_setting)

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        groups: Iterable[Group] = (),
    ) -> None:
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        super().__init__(parameters, lr, weight_decay, groups)
        hooks.optimizer_checks().check_nesterov(self.nesterov, self.momentum, self.dampening)

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

        # b = momentum b + (1 - dampening) g, or g in the first step
        if self.momentum:
            buffer = state["momentum_buffer"]
            if count == 1:
                xp.copyto(buffer, grad)
            else:
                buffer *= self.momentum
                buffer += xp.multiply(grad, 1 - self.dampening, out=product) if self.dampening else grad
            # g = b; Nesterov looks one step ahead, and has no dampening: g + momentum b
            if self.nesterov:
                xp.multiply(buffer, self.momentum, out=product)
                product += grad
            grad = product if self.nesterov else buffer

        # p -= lr g
        xp.multiply(grad, lr, out=product)
        data -= product
