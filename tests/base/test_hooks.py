"""The core runs with empty hooks, and refuses what they would add."""

from dataclasses import replace

import numpy as np
import pytest

from minidist.base import hooks
from minidist.base.errors import UsageError
from minidist.collectives import ALGORITHMS, all_reduce
from minidist.comm import SimWorld
from minidist.nn import GPT, MLP, GPTConfig, Llama, LlamaConfig
from minidist.parallel.model_parallel import apply_context_parallel
from minidist.parallel.tensor import parallelize
from minidist.pipeline.plan import get_schedule
from minidist.pipeline.validate import validate


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


def test_the_core_has_the_plans_of_a_gpt_and_an_mlp_and_refuses_what_is_not_added(monkeypatch):
    llama = Llama(LlamaConfig(7, 8, 8, 1, 2, max_position_embeddings=4))
    assert "model.layers.*.mlp.up_proj" in parallelize.tensor_parallel_plan(llama)
    monkeypatch.setattr(parallelize, "plan_sources", [])
    assert set(parallelize.tensor_parallel_plan(MLP([4, 4, 2]))) == {"layers.0", "layers.1"}
    assert "lm_head" in parallelize.tensor_parallel_plan(GPT(GPTConfig(7, 4, 8, 1, 2)))
    with pytest.raises(UsageError, match="no tensor-parallel plan for a Llama; pass one"):
        parallelize.tensor_parallel_plan(llama)
    with pytest.raises(UsageError, match=r"unknown attention 'rign'.*'ring'"):
        SimWorld(2).run(lambda comm: apply_context_parallel(GPT(GPTConfig(7, 4, 8, 1, 2)), comm, 4, "rign"))


def test_more_schedules_and_update_rules_are_loaded_when_a_name_is_not_there(monkeypatch):
    found = []

    def empty():
        monkeypatch.setattr(hooks, "more_schedules", [lambda: found.append("more")])

    empty()
    plan = get_schedule("1F1B").plan(2, 2)
    validate(plan)
    assert found == []
    with pytest.raises(UsageError, match="unknown schedule 'none'"):
        get_schedule("none")
    assert found == ["more"]
    empty()
    with pytest.raises(UsageError, match="plan '1f1b' has updates='later'; it must be one of flush, none"):
        validate(replace(plan, updates="later"))
    assert found == ["more", "more"]
