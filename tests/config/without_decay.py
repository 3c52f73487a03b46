"""An optimizer that has no weight decay, for the case of its rule."""

from minidist.core.optim import Optimizer


class WithoutDecay(Optimizer):
    """p -= lr g."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, lr)

    def update(self, data, grad, state, work, lr, decay, count):
        data -= lr * grad
