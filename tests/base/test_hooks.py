"""The core runs with empty hooks, and refuses what they would add."""

import numpy as np
import pytest

from minidist.autograd import Tensor, cross_entropy
from minidist.base import hooks
from minidist.base.errors import UsageError
from minidist.collectives import ALGORITHMS, all_reduce
from minidist.comm import SimWorld
from minidist.nn import MLP
from minidist.optim import SGD
from minidist.parallel import DistributedDataParallel, ZeroOptimizer, fully_shard, sharded_parameters


@pytest.fixture
def core_alone(monkeypatch):
    monkeypatch.setattr(hooks, "choosers", {})
    for name in ("call_checks", "more_algorithms", "algorithm_sources", "guards", "shard_arguments", "one_event"):
        monkeypatch.setattr(hooks, name, [])


@pytest.mark.usefixtures("core_alone")
def test_a_collective_runs_without_what_is_added_to_the_core():
    assert SimWorld(3).run(lambda comm: all_reduce(comm, np.full(2, comm.rank)).tolist()) == [[3, 3]] * 3
    for name in ("auto", "nowhere.py:f"):
        with pytest.raises(UsageError, match=f"unknown all_reduce algorithm '{name}'"):
            SimWorld(1).run(lambda comm, name=name: all_reduce(comm, np.ones(2), algorithm=name))


def test_more_algorithms_are_registered_when_a_name_is_not_there(monkeypatch):
    found = []
    monkeypatch.setattr(hooks, "more_algorithms", [lambda: found.append("more")])
    assert "ring" in ALGORITHMS["all_reduce"]
    assert found == []
    assert "none" not in ALGORITHMS["all_reduce"]
    assert "none" not in ALGORITHMS["all_reduce"]
    assert found == ["more"]


def replicas(model, comm):
    wrapped = DistributedDataParallel(model, comm, algorithm="ordered")
    return wrapped, SGD(wrapped.flat, lr=0.1)


def zero(model, comm, stage):
    return model, ZeroOptimizer(model, SGD, comm=comm, stage=stage, algorithm="ordered", lr=0.1)


def sharded(model, comm):
    fully_shard(model, mesh=comm, algorithm="ordered")
    return model, SGD(sharded_parameters(model), lr=0.1)


WRAPPERS = {
    "data parallelism": replicas,
    "ZeRO 1": lambda model, comm: zero(model, comm, 1),
    "ZeRO 2": lambda model, comm: zero(model, comm, 2),
    "ZeRO 3": sharded,
}


def trained(comm, wrap):
    """The losses of three steps, and the messages that the rank has sent but those of the guard, which compare."""
    model, optimizer = wrap(MLP([4, 6, 3]), comm)
    rng, losses = np.random.default_rng(comm.rank), []
    for _ in range(3):
        loss = cross_entropy(model(Tensor(rng.standard_normal((5, 4)).astype(np.float32))), np.arange(5) % 3)
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sent = [(m.purpose, m.nbytes) for m in comm.trace.messages if m.purpose != "startup"]
    return losses, sent


def test_a_wrapper_trains_and_sends_the_same_with_no_guard(request):
    """A guard adds a text to each message, and 16 bytes at the start."""
    guarded = {name: SimWorld(2).run(trained, wrap) for name, wrap in WRAPPERS.items()}
    request.getfixturevalue("core_alone")
    for name, wrap in WRAPPERS.items():
        assert SimWorld(2).run(trained, wrap) == guarded[name], name
        assert guarded[name][0][1], name
        assert guarded[name][0][0] == guarded["ZeRO 1"][0][0], name
