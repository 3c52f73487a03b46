"""Running statistics of batch norms are in a checkpoint: a resumed job evaluates the model that was saved."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.runner import run_training
from minidist.core.base.errors import UsageError
from minidist.data import glyphs
from minidist.job.checkpoint import Checkpoint
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train as train_job
from minidist.nn.buffers import named_buffers

MODEL = """
from minidist.nn import relu
from minidist.core.nn import Linear, Module
from minidist.nn import BatchNorm

class Normed(Module):
    def __init__(self, features, width, classes):
        self.first, self.norm = Linear(features, width, dtype="float64"), BatchNorm(width, dtype="float64")
        self.last = Linear(width, classes, dtype="float64")
    def forward(self, x):
        return self.last(relu(self.norm(self.first(x))))

def normed(config, dataset):
    return Normed(dataset.features, config.width, dataset.classes).initialize(config.seed)
"""


def config_of(folder, steps, **settings):
    (folder / "mine.py").write_text(MODEL)
    common = {"data": "glyphs", "width": 8, "optimizer": "sgd", "precision": "fp64", "global_batch": 12}
    model = f"{folder / 'mine.py'}:normed"
    return TrainConfig.make(model=model, **common, steps=steps, evaluate_every=2, **settings)


@pytest.fixture
def train(tmp_path):
    return lambda steps, **settings: run_training(config_of(tmp_path, steps, **settings), None, 60, None)


@pytest.mark.parametrize("then", [{}, {"dp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_a_resumed_job_evaluates_the_model_that_was_saved(train, tmp_path, then):
    straight = train(4, accumulation=2)
    train(2, dp=2, save=str(tmp_path / "ck"))
    assert Checkpoint(tmp_path / "ck").tensor("buffers/norm.running_mean").shape == (8,)
    settings = then or {"accumulation": 2}
    resumed = train(4, **settings, save=str(tmp_path / "ck"), resume=True)
    assert resumed.losses == pytest.approx(straight.losses, rel=1e-12)
    assert resumed.held_out[4] == pytest.approx(straight.held_out[4], rel=1e-12)


def test_a_new_job_begins_with_the_statistics_of_its_initial_weights(train, tmp_path):
    # Here, so that the other tests are collected without this technique.
    from minidist.techniques.initial_weights.weights import load_initial_weights

    train(2, save=str(tmp_path / "ck"))
    saved = Checkpoint(tmp_path / "ck")
    config = config_of(tmp_path, 2, init_from=str(tmp_path / "ck"))
    net = make_model(config, glyphs())
    load_initial_weights(config.init_from, config, net)
    for name, array in named_buffers(net):
        np.testing.assert_array_equal(array, saved.tensor(f"buffers/{name}"))
        assert abs(array - (name == "norm.running_var")).min() > 0  # not those of a new model


def test_a_checkpoint_without_them_is_one_sentence(train, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("minidist.job.checkpoint.resume.buffer_shards", lambda *_: [])
        train(2, save=str(tmp_path / "ck"))
    with pytest.raises(UsageError, match=r"has no tensor 'buffers/norm.running_mean'"):
        train(4, save=str(tmp_path / "ck"), resume=True)


def test_the_statistics_of_a_stage_on_two_ranks_are_written_once(tmp_path):
    """DualPipe holds each stage on two ranks; each of them, times the pipelines, is another replica."""
    found = []

    def main(comm):
        config = TrainConfig.make(
            model="cnn", data="glyphs", layers=2, pp=2, dp=2, schedule="dualpipe", microbatches=4, heads=4, context=64
        )
        train_job(comm, config.model_copy(update={"steps": 1}), [lambda state: found.append(state.strategy.buffers())])

    SimWorld(4).run(main)
    replicas = {}
    for buffers in found:
        for name, _, replica in buffers:
            replicas.setdefault(name, []).append(replica.number)
    assert replicas
    for name, numbers in replicas.items():
        assert sorted(numbers) == [0, 1, 2, 3], name
