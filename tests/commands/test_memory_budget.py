"""`--memory-budget`: the largest micro-batch that fits, and the job with it is the one that the flag of it gives."""

import json

import pytest

from minidist.base.errors import UsageError
from minidist.cli import main
from minidist.comm import SimWorld
from minidist.commands.memory_budget import fit_micro_batch
from minidist.config.train_config import TrainConfig
from minidist.train.trainer import train

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "data": "markov", "global_batch": 24, "steps": 2, "dp": 2}


@pytest.fixture(scope="module")
def peaks():
    """The peak of every micro-batch that divides the 12 samples of a rank."""
    found = {}
    for micro in (1, 2, 3, 4, 6, 12):
        results = SimWorld(2, record=False).run(train, TrainConfig.make(**SMALL, zero=2, micro_batch=micro))
        found[micro] = max(result.peak_bytes for result in results)
    return found


@pytest.mark.parametrize("micro", [1, 3, 4, 12])
def test_the_largest_that_fits_is_taken(micro, peaks):
    for budget in (peaks[micro], min([n for m, n in peaks.items() if m > micro], default=10**9) - 1):
        config, line = fit_micro_batch(TrainConfig.make(**SMALL, zero=2), None, budget)
        assert config.micro_batch == micro
        assert f"--accumulation {12 // micro}: a rank has {peaks[micro]:,} B alive" in line


def test_a_batch_that_the_ranks_do_not_divide():
    config, line = fit_micro_batch(TrainConfig.make(**{**SMALL, "global_batch": 25}, zero=2), None, 1e9)
    assert (config.micro_batch, line.startswith("--micro-batch 13 --accumulation 1:")) == (13, True)


def test_with_servers_too():
    config, line = fit_micro_batch(TrainConfig.make(**SMALL, strategy="ps"), None, 1e9)
    assert (config.micro_batch, line.startswith("--micro-batch 12 --accumulation 1:")) == (12, True)


@pytest.mark.parametrize(
    ("values", "budget", "sentence"),
    [
        ({}, 1000, "B alive at a time even with --micro-batch 1; raise it"),
        ({"global_batch": None}, 1e9, "add --global-batch SAMPLES"),
        ({"micro_batch": 2}, 1e9, "--micro-batch 2 gives it; leave one of them out"),
        ({"global_batch": 1}, 1e9, "leave 0 for rank 1"),
    ],
)
def test_what_is_refused(values, budget, sentence):
    with pytest.raises(UsageError, match=sentence):
        fit_micro_batch(TrainConfig.make(**{**SMALL, **values}), None, budget)


def test_the_command_prints_it_and_a_resumed_job_keeps_it(tmp_path, capsys, peaks):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "steps"]
    flags += ["--zero=2", f"--memory-budget={peaks[4]}", f"--save={tmp_path / 'c'}", "--trace=none", "--json"]
    for more in (["--steps=2"], ["--steps=3", "--resume"]):
        with pytest.raises(SystemExit):
            main(["train", *flags, *more])
        captured = capsys.readouterr()
        assert f"--micro-batch 4 --accumulation 3: a rank has {peaks[4]:,} B alive at a time" in captured.err
        assert max(json.loads(captured.out)["peak_bytes"]) <= peaks[4]
