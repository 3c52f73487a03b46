"""Stochastic gradient descent, plain and with momentum: the baseline, and the method with the least state.

Momentum is one array as large as the parameters. Sources: B. Polyak, "Some methods of speeding up the convergence of
iteration methods" (1964), the heavy ball; I. Sutskever et al., "On the importance of initialization and momentum in
deep learning" (ICML 2013), section 2, for Nesterov's form.

Where they differ this is PyTorch's `torch.optim.SGD`: the learning rate multiplies the whole buffer at each step (the
papers fold it into the buffer, which differs when the rate changes), the buffer starts as the first gradient without
dampening, and weight decay is added to the gradient.
Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.optim.optimizer import Group, Optimizer, State


class SGD(Optimizer):
    """g += decay p;  b = momentum b + (1 - dampening) g;  g = b (Nesterov: g + momentum b);  p -= lr g.

    State: "momentum_buffer", only with momentum.
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
        hooks.optimizer_checks().check_nesterov(nesterov, momentum, dampening)
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

        # b = momentum b + (1 - dampening) g; Nesterov looks one step ahead
        if self.momentum:
            buffer = state["momentum_buffer"]
            # The buffer begins as the first gradient, without dampening.
            if count == 1:
                xp.copyto(buffer, grad)
            else:
                buffer *= self.momentum
                if self.dampening:
                    xp.multiply(grad, 1 - self.dampening, out=product)
                    buffer += product
                else:
                    buffer += grad
            # g + momentum b for Nesterov, else b itself
            if self.nesterov:
                xp.multiply(buffer, self.momentum, out=product)
                product += grad
                grad = product
            else:
                grad = buffer

        # p -= lr g
        xp.multiply(grad, lr, out=product)
        data -= product
