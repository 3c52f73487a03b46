"""What is no error and most often a mistake is said once, at the line of the user's program."""

import warnings

import numpy as np
import pytest

from minidist import SGD, DistributedDataParallel, Linear, Module, SimWorld, Tensor, cross_entropy, mse_loss
from minidist.nn import Embedding
from tests.cases import each

NOTHING = np.zeros((0, 3))


class TwoLayers(Module):
    def __init__(self, initialized):
        self.one, self.two = Linear(2, 2), Linear(2, 2)
        if initialized:
            self.initialize(0)


def wrapped(model):
    SimWorld(2).run(lambda comm: DistributedDataParallel(model(), comm) and None)


CASES = {
    "no gradient": (
        lambda: SGD(Linear(2, 2).parameters(), lr=0.1).step(),
        r"SGD.step\(\) changes nothing.*backward\(\)",
    ),
    "no elements": (lambda: Tensor(NOTHING).mean(), "the mean over 0 elements is nan; .*divisor="),
    "no rows": (lambda: cross_entropy(Tensor(NOTHING), np.zeros(0, int)), "the mean over 0 rows is nan"),
    "none that counts": (lambda: cross_entropy(Tensor(np.ones((1, 3))), [-100]), "the mean over 0 rows is nan"),
    "no errors": (lambda: mse_loss(Tensor(NOTHING), NOTHING), "the mean over 0 elements is nan"),
    "no names": (lambda: wrapped(lambda: TwoLayers(False)), "parameters of TwoLayers are called 'weight'.*initialize"),
}
SILENT = {
    "a later step": lambda: stepped_twice(),
    "a divisor": lambda: cross_entropy(Tensor(NOTHING), np.zeros(0, int), divisor=2),
    "rows": lambda: cross_entropy(Tensor(np.ones((1, 3))), [0]),
    "names": lambda: wrapped(lambda: TwoLayers(True)),
    "one layer": lambda: wrapped(lambda: Embedding(3, 2)),
}


def stepped_twice():
    layer = Linear(2, 2)
    optimizer = SGD(layer.parameters(), lr=0.1)
    layer(Tensor(np.ones((1, 2), np.float32))).sum().backward()
    optimizer.step()
    layer.zero_grad()
    optimizer.step()


@each("case", CASES.values(), ids=list(CASES))
def test_what_is_most_often_a_mistake_is_a_warning_at_the_users_line(case):
    call, words = case
    with pytest.warns(UserWarning, match=words) as caught:
        call()
    assert {warning.filename for warning in caught} == {__file__}


@each("call", SILENT.values(), ids=list(SILENT))
def test_what_is_right_is_no_warning(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
