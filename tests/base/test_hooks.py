"""The core runs with empty hooks, and refuses what they would add."""

import numpy as np
import pytest

from minidist.base import hooks
from minidist.base.errors import UsageError
from minidist.collectives import ALGORITHMS, all_reduce
from minidist.comm import SimWorld


def test_a_collective_runs_without_what_is_added_to_the_core(monkeypatch):
    for name in ("choosers", "one_event"):
        monkeypatch.setattr(hooks, name, {})
    for name in ("more_algorithms", "algorithm_sources"):
        monkeypatch.setattr(hooks, name, [])

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
