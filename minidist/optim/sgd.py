"""`SGD` with the dampening of its momentum, and Nesterov's form of it, as in PyTorch.

Source: I. Sutskever et al., "On the importance of initialization and momentum in deep learning" (ICML 2013), section 2.
Proved by: tests/optim/test_optimizers.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.optim import sgd
from minidist.core.optim.optimizer import Group
from minidist.optim.checks import check_nesterov, checked_setting


class SGD(sgd.SGD):
    """g += decay p;  b = momentum b + (1 - dampening) g;  g = b (Nesterov: g + momentum b);  p -= lr g.

    State: "momentum_buffer", only with momentum; it begins as the first gradient, without dampening.
    """

    settings = sgd.SGD.settings | dict.fromkeys(("dampening", "nesterov"), checked_setting)

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
        self.dampening, self.nesterov = dampening, nesterov
        super().__init__(parameters, lr, momentum, weight_decay, groups)
        check_nesterov(self.nesterov, self.momentum, self.dampening)

    def average(self, grad: xp.Array, buffer: xp.Array, product: xp.Array, count: int) -> xp.Array:
        """b = momentum b + (1 - dampening) g; returns b, or g + momentum b."""
        if self.dampening and count > 1:
            buffer *= self.momentum
            xp.multiply(grad, 1 - self.dampening, out=product)
            buffer += product
        else:
            super().average(grad, buffer, product, count)
        if not self.nesterov:
            return buffer

        # Nesterov looks one step ahead.
        xp.multiply(buffer, self.momentum, out=product)
        product += grad
        return product
