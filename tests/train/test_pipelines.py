"""`train --pp`: bit for bit equal to one device, volumes equal to the closed form, errors in one sentence."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.pipeline.runtime.reduction import SharedGradients
from minidist.job.config.pipeline_plan import make_plan
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from tests.cases import each
from tests.equality.test_equality import verdict

SMALL = {"width": 8, "heads": 2, "context": 6, "data": "markov", "steps": 2, "micro_batch": 2, "reduction": "ordered"}


@each(
    "name",
    [
        *("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "v-min", "v-half"),
        *("dualpipe", "dualpipev"),
    ],
    sampled=6,
)
@each("optimizer", ["sgd", "adamw"])
def test_every_schedule_equals_one_device(name, optimizer):
    result = verdict(
        2, **SMALL, pp=2, layers=4, schedule=name, microbatches=4, clip=0.5, dropout=0.1, optimizer=optimizer
    )
    assert result.equal, result.first_difference
    assert (result.tier, result.steps, result.ranks) == ("ordered", 2, 2)


def test_recomputation_is_in_the_plan():
    plan = make_plan(TrainConfig.make(pp=2, layers=2, recompute="full"), 3)
    kinds = [action.kind for rank in range(plan.ranks) for action in plan.actions(rank)]
    assert kinds.count("RECOMPUTE") == kinds.count("F") == 2 * 3


@pytest.mark.parametrize(
    "values", [{"schedule": "1f1b"}, {"schedule": "zb-v", "layers": 4}, {"schedule": "1f1b", "zero": 2}]
)
def test_the_copies_of_a_tied_weight_keep_the_same_bits_on_a_ring(values):
    """Three replicas: a ring adds an element in an order that depends on its place, and the copies lie in different
    places.
    """
    config = TrainConfig.make(
        **{
            **SMALL,
            "layers": 2,
            "pp": 2,
            "dp": 3,
            "microbatches": 4,
            "reduction": "ring",
            "check_replicas": True,
            "steps": 3,
            **values,
        }
    )
    assert len(SimWorld(6).run(lambda comm: train(comm, config).losses)[0]) == 3


def test_a_planted_difference_is_found(monkeypatch):
    """The comparison sees copies of the tied embedding that keep their own gradients."""
    monkeypatch.setattr(SharedGradients, "add", lambda self: None)
    result = verdict(2, **SMALL, pp=2, layers=2, microbatches=3)
    assert not result.equal
    assert "transformer.wte.weight" in result.first_difference


@each(
    ("values", "sentence"),
    [
        ({"pp": 4, "layers": 2}, "cannot cut 2 layers into 4 stages.*--layers 4"),
        ({"pp": 2, "schedule": "1f1"}, "unknown schedule '1f1'"),
        ({"pp": 2, "layers": 4, "schedule": "interleaved", "microbatches": 5}, "take 4 or 6"),
        ({"pp": 2, "microbatches": 2, "accumulation": 3}, "are the same number"),
        ({"pp": 2, "dp": 2, "ranks": 2}, "--pp 2 --dp 2 does not fit 2 ranks.*start 4 ranks"),
        ({"pp": 2, "schedule": "bad.csv"}, "the plan 'bad.csv' cannot be read"),
    ],
)
def test_what_does_not_fit_is_one_sentence(values, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {**SMALL, "layers": 2, **values}
    with pytest.raises(UsageError, match=sentence):
        number_of_ranks(TrainConfig.make(**{k: v for k, v in values.items() if k != "ranks"}), values.get("ranks"))


def test_the_ranks_of_a_pipeline_are_its_degrees():
    assert number_of_ranks(TrainConfig.make(**SMALL, pp=2, dp=3, layers=2), None) == 6
    assert resolve_batches(TrainConfig.make(pp=4), 4).accumulation == 8


def test_a_users_own_plan(tmp_path):
    """Its stages add in different orders, so the tied embedding's two sums must be those of the right stages."""
    (tmp_path / "mine.csv").write_text("0F0,0F1,0F2,0B2,0B0,0B1\n1F0,1F1,1F2,1B0,1B1,1B2\n")
    result = verdict(2, **SMALL, pp=2, layers=2, schedule=str(tmp_path / "mine.csv"))  # three micro-batches, as written
    assert result.equal, result.first_difference
    assert np.isfinite(result.losses).all()


@pytest.mark.parametrize("settings", [{}, {"tp": 2}, {"schedule": "interleaved"}])
def test_a_rank_keeps_the_parameters_of_its_own_stages_alone(settings):
    sizes = {"data": "markov", "layers": 4, "width": 16, "heads": 2, "context": 8, "steps": 1, "global_batch": 4}
    config = TrainConfig.make(**sizes, pp=2, microbatches=2, **settings)
    for result in SimWorld(2 * config.tp).run(train, config):
        assert result.step_peak["parameter"] == 4 * sum(sum(axis.units) for axis in result.sizes)
