"""`--init-from`: a new job whose weights are those of a checkpoint, whatever the layouts, and nothing else is."""

from pathlib import Path

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Checkpoint
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from tests.cases import each
from tests.jobs import equals_one_device

ROOT = Path(__file__).parents[2]
SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 6, "global_batch": 4, "steps": 2}
SMALL["data"] = f"text:{ROOT / 'README.md'}"
LAYOUTS = {
    "one device": (1, {}),
    "ZeRO 3": (4, {"zero": 3}),
    "tensor parallel": (2, {"tp": 2}),
    "stages": (2, {"pp": 2, "microbatches": 2}),
    "servers": (3, {"strategy": "ps"}),
    "local steps": (2, {"local_steps": 2}),
}


def run(layout, **values):
    ranks, flags = LAYOUTS[layout]
    return SimWorld(ranks).run(train, TrainConfig.make(**{**SMALL, **flags, **values}))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("pretrained"))
    run("ZeRO 3", save=directory, steps=4, every=2)
    return directory


@each("layout", LAYOUTS)
def test_every_layout_begins_with_the_weights_and_with_nothing_else(layout, trained):
    new = {"data": f"text:{ROOT / 'CHANGELOG.md'}", "seed": 7, "optimizer": "sgd", "lr": 0.5, "precision": "fp64"}
    losses = run(layout, init_from=trained, **new).losses
    alone = run("one device", init_from=trained, **new).losses
    same = 1 if layout == "local steps" else 2  # replicas that train alone have other weights after a step
    assert losses[:same] == pytest.approx(alone[:same], rel=1e-9)
    assert losses[0] != pytest.approx(run("one device", **new).losses[0], rel=1e-4)
    assert len(losses) == 2


def test_the_weights_are_those_of_the_checkpoint_or_of_one_of_its_folders(trained):
    for path, name in ((trained, "step-00000004"), (f"{trained}/step-00000002", "step-00000002")):
        config = TrainConfig.make(**SMALL, init_from=path)
        checkpoint = Checkpoint(trained, name)
        for parameter in build(config, resolve_batches(config, 1)).model.parameters():
            assert np.array_equal(parameter.data, checkpoint.tensor(f"weights/{parameter.name}"))


def test_it_is_compared_with_one_device_and_saved_and_resumed(trained, tmp_path):
    config = TrainConfig.make(**SMALL, init_from=trained, reduction="ordered", zero=2, dp=2)
    equals_one_device(2, config)
    whole = run("ZeRO 3", init_from=trained, steps=4, save=str(tmp_path / "a"))
    run("ZeRO 3", init_from=trained, steps=2, save=str(tmp_path / "b"))
    resumed = run("ZeRO 3", steps=4, save=str(tmp_path / "b"), resume=True)
    assert (resumed.digest, resumed.losses) == (whole.digest, whole.losses)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 32}, "holds a model with --width 16, this job has 32; train with --width 16"),
        ({"heads": 4}, "--heads 2"),
        ({"model": "llama"}, "--model gpt"),
        ({"context": 5}, "transformer.wpe.weight"),
        ({"init_from": "nowhere"}, "--init-from 'nowhere' has no checkpoint in it; name a directory that train"),
    ],
)
def test_what_does_not_fit_is_refused(change, sentence, trained):
    with pytest.raises(UsageError, match=sentence):
        run("one device", **{"init_from": trained, **change})
    if "context" not in change:
        with pytest.raises(UsageError, match=sentence):  # before any rank starts
            number_of_ranks(TrainConfig.make(**{**SMALL, "init_from": trained, **change}), 1)
