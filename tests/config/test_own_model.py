"""--model FILE.py:FUNCTION: a model of the user's trains to one device's bits, or is refused with one sentence."""

import re

import pytest

from minidist.commands.generation import load_model
from minidist.commands.runner import run_comparison, run_training
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.start import number_of_ranks
from minidist.planning.profiler import profile_layers

MODELS = """
from minidist.nn import relu
from minidist.core.nn import Embedding, LayerNorm, Linear, Module, Sequential
from minidist.nn import BatchNorm

class Net(Module):
    def __init__(self, features, width, classes, seed):
        self.first = Linear(features, width)
        self.layers = Sequential(Linear(width, width), LayerNorm(width))  # a name that GPT's stages have, too
        self.last = Linear(width, classes)
        self.initialize(seed)
    def forward(self, x):
        return self.last(relu(self.layers(relu(self.first(x)))))

class Bigram(Module):
    def __init__(self):
        self.table, self.out = Embedding(256, 8), Linear(8, 256)
    def forward(self, tokens):
        return self.out(self.table(tokens))

def classifier(config, dataset):
    return Net(dataset.features, config.width, dataset.classes, config.seed)
def bigram(config):
    return Bigram()
def plain():
    return Bigram()
class Normed(Module):
    def __init__(self, features, width, classes, seed):
        self.first, self.norm = Linear(features, width, dtype="float64"), BatchNorm(width, dtype="float64")
        self.last = Linear(width, classes, dtype="float64")
        self.initialize(seed)
    def forward(self, x):
        return self.last(relu(self.norm(self.first(x))))

def normed(config, dataset):
    return Normed(dataset.features, config.width, dataset.classes, config.seed)
def number():
    return 3
def empty():
    return Sequential()
def broken(config):
    return config.no_such_setting
"""
CLASSIFIER = {"data": "glyphs", "width": 16}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODELS)
    return lambda name: f"{path}:{name}"


@pytest.mark.parametrize(
    ("name", "settings", "tensors"),
    [
        ("classifier", {**CLASSIFIER, "dp": 2}, 2 * 8 * 4),
        ("classifier", {**CLASSIFIER, "dp": 3, "zero": 3}, 3 * 8 * 4),
        ("bigram", {"dp": 2, "zero": 2, "context": 8, "accumulation": 2}, 2 * 3 * 4),
        ("plain", {"strategy": "ps", "dp": 2, "context": 8}, None),
    ],
)
def test_a_model_of_the_users_own_equals_one_device(model, name, settings, tensors):
    reduction = "ring" if settings.get("strategy") == "ps" else "ordered"
    config = TrainConfig.make(model=model(name), steps=2, reduction=reduction, **settings)
    verdict = run_comparison(config, None, 60)
    assert verdict.equal, verdict.sentence()
    # Weights, gradients and Adam's two states of every parameter.
    assert tensors is None or verdict.tensors >= tensors


def test_a_model_of_the_users_own_trains_by_name_and_its_bytes_are_the_closed_form(model, tmp_path):
    config = TrainConfig.make(
        model=model("classifier"), **CLASSIFIER, dp=2, steps=6, evaluate_every=3, save=str(tmp_path / "ck"), lr=0.01
    )
    summary = run_training(config, None, 60, None)
    assert summary.losses[-1] < summary.losses[0]
    assert summary.volumes_hold()
    again = run_training(config.model_copy(update={"steps": 8, "resume": True}), None, 60, None)
    assert (again.losses[:6], len(again.losses)) == (summary.losses, 8)
    with pytest.raises(UsageError, match=r"holds a model of your own \(--model .*\), which generates no text here"):
        load_model(tmp_path / "ck")


NORMED = {**CLASSIFIER, "optimizer": "sgd", "precision": "fp64", "steps": 3, "evaluate_every": 3, "global_batch": 24}


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "accumulation": 2},
        {"dp": 2, "accumulation": 2, "synchronize_each": True},
        {"dp": 2, "accumulation": 2, "zero": 1},
        {"dp": 2, "accumulation": 2, "zero": 2},
        {"dp": 4, "zero": 3},
        {"dp": 4, "zero": 3, "dp_replicate": 2},
    ],
    ids=str,
)
def test_batch_norms_evaluate_as_on_one_device_and_their_bytes_are_the_closed_form(model, settings):
    alone = run_training(TrainConfig.make(model=model("normed"), **NORMED, accumulation=4), None, 60, None)
    summary = run_training(TrainConfig.make(model=model("normed"), **NORMED, **settings), None, 60, None)
    assert summary.volumes_hold()
    assert summary.bytes_by_purpose["metrics"]["measured"] > 3 * settings["dp"] * (1 + 2 * 16) * 8
    assert summary.held_out[3] == pytest.approx(alone.held_out[3], rel=1e-12)


def test_local_sgd_averages_the_statistics_of_batch_norms(model):
    config = TrainConfig.make(model=model("normed"), **NORMED, dp=2, local_steps=2)
    summary = run_training(config, None, 60, None)
    assert summary.volumes_hold()
    # Two averages of 16 means and 16 variances, over 2 ranks, and the losses.
    assert summary.bytes_by_purpose["metrics"]["measured"] == 2 * 2 * 32 * 8 + 3 * 2 * 8


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("classifer", {}, r"has no function 'classifer' \(did you mean 'classifier'\?\)"),
        ("number", {}, "--model .*:number returns 3; return a minidist.Module that has parameters"),
        ("empty", {}, "--model .*:empty returns .*Sequential.*; return a minidist.Module that has parameters"),
        ("plain", {"width": 32}, r"--width 32 has no effect, because .* takes no config; write FUNCTION\(config\)"),
        ("plain", {"context": 8, "data": "glyphs"}, r"--context 8 has no effect, .* read config\.context, or leave"),
        ("broken", {}, "--model .*:broken raises AttributeError: .*no_such_setting.*; correct the function"),
        (
            "plain",
            {"precision": "fp64"},
            "parameter 'table.weight' of float32, and --precision is fp64; make its layers",
        ),
    ],
)
def test_what_is_no_model_is_one_sentence_before_any_rank_starts(model, name, settings, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        number_of_ranks(TrainConfig.make(model=model(name), dp=2, **settings), None)
    assert "\n" not in str(caught.value)


def test_what_needs_blocks_is_refused(model):
    with pytest.raises(UsageError, match=r"does not know those of --model .*; use --model gpt, llama, mlp or cnn"):
        profile_layers(TrainConfig.make(model=model("plain")))


def test_an_unknown_name_of_a_model():
    with pytest.raises(
        UsageError, match=re.escape("--model 'bert': input should be 'gpt', 'llama', 'mlp', 'cnn' or FILE.py")
    ):
        TrainConfig.make(model="bert")
