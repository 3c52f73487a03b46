"""`--optimizer FILE.py:CLASS`, `--data FILE.py:FUNCTION`: they equal one device in every layout, or are refused."""

import json

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.trainer import train
from minidist.optim.named import takes

FILE = '''
import numpy as np
from minidist.data import SampleDataset
from minidist.core.optim import Optimizer
from minidist.optim import SGD

class SignSGD(Optimizer):
    """p -= lr sign(g + momentum b), with b the average of the gradients."""
    def __init__(self, parameters, lr=0.01, momentum=0.0):
        self.momentum = momentum
        super().__init__(parameters, lr)
    def initial_state(self):
        return {"average": 0.0}
    def update(self, data, grad, state, work, lr, decay, count):
        state["average"] *= self.momentum
        state["average"] += grad
        data -= lr * np.sign(state["average"])

class WithoutRate(Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, 0.1)

class Copy(SGD):
    pass

class PassesOn(SGD):
    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)

def words():
    return None

def breaks():
    raise ValueError("no such table")

def wave():
    x = np.random.default_rng(0).standard_normal((96, 6)).astype(np.float32)
    return SampleDataset("wave", x, (x.sum(axis=1) > 0).astype(np.int64), 2)
'''
JOB = {"model": "mlp", "layers": 1, "width": 16, "steps": 4, "lr": 0.01, "micro_batch": 2, "reduction": "ordered"}
WORDS = ["--model", "mlp", "--layers", "1", "--width", "16", "--steps", "3", "--lr", "0.01", "--data", "mine.py:wave"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)


def trained(ranks, **values):
    config = TrainConfig.make(**JOB, **values)
    check_rules(config, resolve_batches(config, ranks))
    return SimWorld(ranks).run(train, config)


@pytest.mark.parametrize("layout", ["--dp 4", "--dp 4 --zero 1", "--dp 4 --zero 3", "--dp 2 --pp 2", "--tp 2 --dp 2"])
def test_every_layout_equals_one_device(layout, minidist):
    flags = ["--optimizer", "mine.py:SignSGD", "--momentum", "0.9", "--layers", "2", "--precision", "fp64"]
    assert json.loads(minidist("compare", *WORDS, *flags, *layout.split(), "--json").out)["equal"]


def test_a_class_that_changes_nothing_gives_the_same_bits():
    one, other = (trained(2, dp=2, optimizer=name, momentum=0.9, data="glyphs") for name in ("sgd", "mine.py:Copy"))
    assert one[0].losses == other[0].losses
    assert one[0].digest == other[0].digest


def test_a_class_has_the_flags_of_the_base_class_to_which_it_passes_arguments():
    assert takes("mine.py:PassesOn", "momentum")
    assert takes("muon", "betas")
    assert not takes("mine.py:SignSGD", "weight_decay")


def test_it_is_saved_and_resumed_to_the_bit():
    flags = {"dp": 2, "optimizer": "mine.py:SignSGD", "momentum": 0.5, "data": "mine.py:wave"}
    whole = trained(2, **flags)
    config = TrainConfig.make(**JOB, **flags, save="run", every=2)
    SimWorld(2).run(train, config.model_copy(update={"steps": 2}))
    rest = SimWorld(2).run(train, config.model_copy(update={"resume": True}))
    assert (rest[0].digest, rest[0].losses) == (whole[0].digest, whole[0].losses)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer": "mine.py:WithoutRate"}, "takes no lr; let its __init__ have parameters and lr"),
        ({"optimizer": "mine.py:words"}, "is not a subclass of minidist.core.optim.Optimizer; derive"),
        ({"optimizer": "mine.py:SignSDG"}, "has no class 'SignSDG' .did you mean 'SignSGD'"),
        (
            {"optimizer": "mine.py:SignSGD", "betas": "0.9,0.99"},
            "--betas 0.9,0.99 does not apply to --optimizer mine.py",
        ),
        (
            {"optimizer": "mine.py:SignSGD", "weight_decay": 0.1},
            "--weight-decay 0.1 does not apply to --optimizer mine",
        ),
        ({"optimizer": "sgdd"}, r"input should be 'sgd', .* or FILE.py:CLASS"),
        ({"data": "mine.py:words"}, "--data mine.py:words returned a value of type NoneType; return a"),
        ({"data": "mine.py:breaks"}, "raised ValueError: no such table; it is called without arguments"),
        ({"data": "mine.py:waves"}, "has no function 'waves' .did you mean 'wave'"),
    ],
)
def test_what_is_wrong_is_one_sentence(values, sentence):
    with pytest.raises(UsageError, match=sentence):
        trained(2, **{"data": "glyphs", "dp": 2, **values})


def test_the_data_are_those_of_the_function():
    results = trained(2, dp=2, data="mine.py:wave")
    assert np.isfinite(results[0].losses).all()
    assert results[0].losses != trained(2, dp=2, data="glyphs")[0].losses
