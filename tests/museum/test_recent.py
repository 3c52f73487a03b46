"""The second wing: bugs from public threads of 2024 to 2026, and the checks that catch them.

As in test_checks.py, each check passes here, and the exhibits name those that fail when their bug is injected.
"""

import re

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy, no_grad
from minidist.core.nn import FlatParameters
from minidist.core.nn.experts import MixtureOfExperts
from minidist.course.museum import data_jobs, exhibits, jobs, recent_losses, recent_parallel, run_exhibit, split_jobs
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.optim import SGD
from tests.jobs import equals_one_device
from tests.museum.test_checks import same


@pytest.mark.parametrize("name", data_jobs.JOBS)
def test_each_sample_is_read_once(name):
    """The jobs keep a ledger, which raises."""
    assert len(data_jobs.JOBS[name]().losses) in (3, 6)


def layouts(file, test):
    """The different arguments with which exhibits name a test: ranks and settings."""
    found = [
        catch.arguments for one in exhibits() for catch in one.caught_by if (catch.file, catch.test) == (file, test)
    ]
    return [arguments for i, arguments in enumerate(found) if arguments not in found[:i]]


HERE = "tests/museum/test_recent.py"


def config_of(settings):
    small = {**jobs.SMALL, "width": 8, "layers": 1, "context": 4, "steps": 2, "precision": "fp64"}
    return TrainConfig.make(**{**small, **settings})


@pytest.mark.parametrize(("ranks", "settings"), layouts(HERE, "test_a_job_equals_one_device"))
def test_a_job_equals_one_device(ranks, settings):
    config = config_of(settings)
    equals_one_device(ranks, config)


@pytest.mark.parametrize(("ranks", "settings"), layouts(HERE, "test_replicas_stay_equal"))
def test_replicas_stay_equal(ranks, settings):
    SimWorld(ranks).run(train, config_of({**settings, "check_replicas": True}))


def test_rounds_of_a_pipeline_are_one_batch():
    """Every tensor that a rank holds, against one device that sees the whole batch."""
    model = recent_losses.small_gpt()
    flat = FlatParameters(model.parameters())
    inputs, targets = jobs.tokens(0, 4)
    model(inputs, targets, float(targets.size)).backward()
    gradients = {p.name: np.array(p.grad) for p in flat.parameters}
    for rank, tensors in enumerate(recent_losses.pipeline_rounds().tensors):
        for name, gradient in tensors["gradients"].items():
            assert np.max(np.abs(gradient - gradients[name])) < 1e-12, f"rank {rank}: {name}"


def test_a_short_window_is_one_batch():
    """Windows of 12 and of 6 rows, each in one piece."""
    model = jobs.mlp()
    flat = FlatParameters(model.parameters())
    optimizer, losses = SGD(flat, lr=0.5), []
    for step in range(6):
        flat.zero_grad()
        inputs, labels = jobs.points(step, 6 if step % 2 else 12)
        loss = cross_entropy(model(Tensor(inputs)), labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    run = recent_losses.windows()
    assert run.losses == pytest.approx(losses, rel=1e-5)
    for parameter in flat.parameters:
        np.testing.assert_allclose(run.tensors[0]["weights"][parameter.name], parameter.data, atol=1e-5)


def test_every_label_counts_once_in_a_validation():
    """One batch of the 15 rows whose labels count; and the numbers of the report."""
    run = recent_losses.validation()
    model = jobs.mlp()
    for parameter, name in zip(model.parameters(), run.tensors[0]["weights"], strict=True):
        parameter.data[...] = run.tensors[0]["weights"][name]
    rows = [jobs.points(100 + batch) for batch in range(3)]
    inputs = np.concatenate([x[:n] for (x, _), n in zip(rows, (1, 9, 5), strict=True)])
    labels = np.concatenate([y[:n] for (_, y), n in zip(rows, (1, 9, 5), strict=True)])
    with no_grad():
        expected = cross_entropy(model(Tensor(inputs)), labels).item()
    assert run.tensors[0]["validation"]["loss"][0] == pytest.approx(expected, rel=1e-6)
    assert recent_losses.mean_over_batches([2, 90], [1, 9]) == 9.2


def test_means_of_experts_are_the_mean_over_all_rows(monkeypatch):
    """The program without means: every loss is divided by the rows of all ranks, and gradients are sums."""
    monkeypatch.setattr(jobs, "STEPS", 4)
    monkeypatch.setattr(split_jobs, "GPTConfig", lambda *sizes, aux_loss_weight=0, **more: right(*sizes, **more))
    loop = split_jobs.loop
    monkeypatch.setattr(split_jobs, "loop", lambda *parts, **more: loop(*parts, steps=4, **more))
    same(split_jobs.with_experts(4.0), recent_parallel.means_of_experts(), 1e-12)


right = split_jobs.GPTConfig


def test_dropped_tokens_give_the_router_no_gradient():
    """Some tokens are dropped; against the difference quotient of every entry of the router."""
    layer = MixtureOfExperts(3, 4, 2, 1, capacity_factor=0.7, dtype=np.float64, scale=0.5, seed=1)
    draw = np.random.default_rng(0)
    x, weights = draw.standard_normal((1, 16, 3)), draw.standard_normal((1, 16, 3))
    layer.fc_bias.data[...] = layer.proj_bias.data[...] = 0.3  # what an expert makes of nothing is not zero

    def loss():
        return (layer(Tensor(x)) * Tensor(weights)).sum()

    loss().backward()
    assert layer.assignment.dropped >= 4
    for place in np.ndindex(layer.router.shape):
        values = []
        for change in (1e-6, -1e-6):
            layer.router.data[place] += change
            values.append(loss().item())
            layer.router.data[place] -= change
        assert layer.router.grad[place] == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-8)


def test_every_exhibit_names_the_thread_that_reports_it():
    """An issue, or a pull request that mends it, of a repository."""
    recent = [exhibit for exhibit in exhibits() if int(re.match(r"\d+", exhibit.number)[0]) > 100]
    assert len(recent) >= 27
    for exhibit in recent:
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", exhibit.thread)
    run = run_exhibit(recent[0], tests=False)
    assert recent[0].thread in run.text()
    assert run.as_dict()["thread"] == recent[0].thread
