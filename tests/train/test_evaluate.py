"""Held-out loss: of data that is never trained on, the same on every rank and on one device, and it leaves training as it was."""

import json

import numpy as np
import pytest

from minidist.base.errors import UsageError
from minidist.cli import main
from minidist.comm import SimWorld
from minidist.data import hold_out, load_dataset
from minidist.train.checks import check_axes
from minidist.train.config import TrainConfig, resolve_batches
from minidist.train.metrics import read_metrics
from minidist.train.trainer import train

JOB = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov", "steps": 6, "global_batch": 8, "dropout": 0.3}


def test_nothing_held_out_is_trained_on():
    for name in ("markov", "glyphs"):
        whole = load_dataset(name)
        kept, rest = hold_out(whole)
        arrays = (lambda d: d.tokens) if whole.is_tokens else (lambda d: d.inputs)
        assert np.array_equal(np.concatenate([arrays(kept), arrays(rest)]), arrays(whole))
        assert len(arrays(rest)) == pytest.approx(0.1 * len(arrays(whole)), abs=1)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_have_the_digits_of_one_device(ranks, zero):
    layout = {"zero": zero, "accumulation": 2, "precision": "fp64", "reduction": "ordered"}
    results = SimWorld(ranks).run(train, TrainConfig.make(**JOB, **layout, evaluate_every=2))
    alone = SimWorld(1).run(train, TrainConfig.make(**{**JOB, "precision": "fp64", "micro_batch": 8 // ranks // 2}, evaluate_every=2))[0]
    assert list(alone.held_out) == [2, 4, 6]
    for result in results:
        assert result.held_out == results[0].held_out
        assert result.held_out == pytest.approx(alone.held_out, rel=1e-12)
    assert results[0].held_out[6] < results[0].held_out[2]


def test_evaluating_changes_nothing_of_the_training():
    """Dropout is back, no gradient is left behind, and the losses are those of a job that looks once at the end."""
    often, once = (SimWorld(2).run(train, TrainConfig.make(**JOB, evaluate_every=every)) for every in (1, 6))
    assert [r.digest for r in often] == [r.digest for r in once]
    assert often[0].losses == once[0].losses
    assert often[0].held_out[6] == once[0].held_out[6]
    assert often[0].held_out[6] != often[0].losses[-1]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}, {"cp": 2}, {"zero": 3}])
def test_what_it_does_not_combine_with_is_said(layout):
    config = TrainConfig.make(**{**JOB, "dropout": 0.0}, **layout, evaluate_every=1)
    with pytest.raises(UsageError, match="--evaluate-every computes a held-out batch on whole models"):
        check_axes(config, resolve_batches(config, 2))


def test_the_command_says_it_and_its_bytes_are_in_the_closed_form(tmp_path, capsys):
    flags = ["--dp", "3", "--steps", "4", "--width", "16", "--heads", "2", "--context", "8", "--evaluate-every", "2", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["train", *flags, "--metrics", str(tmp_path / "m.jsonl"), "--trace", str(tmp_path / "t.jsonl")])
    assert not end.value.code
    answer = json.loads(capsys.readouterr().out)
    assert list(answer["held_out"]) == ["2", "4"]
    assert answer["bytes_by_purpose"]["evaluation"] == {"measured": 2 * 3 * 2 * 8, "closed_form": 2 * 3 * 2 * 8}
    for volume in answer["bytes_by_purpose"].values():
        assert volume["measured"] == volume["closed_form"]
    assert [record.get("held_out_loss") for record in read_metrics(tmp_path / "m.jsonl")] == [None, answer["held_out"]["2"], None, answer["held_out"]["4"]]
