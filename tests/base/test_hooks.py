"""The core runs with empty hooks, and refuses what they would add."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from minidist import additions
from minidist.base import extras
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.collectives.calls import ALGORITHMS, all_reduce
from minidist.core.nn import GPT, MLP, GPTConfig
from minidist.core.parallel import model_parallel
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters
from minidist.core.parallel.model_parallel import apply_context_parallel
from minidist.core.pipeline.schedules import get_schedule
from minidist.nn import Llama, LlamaConfig
from minidist.optim import SGD
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.zero import ZeroOptimizer
from minidist.pipeline.validate import validate

CORE = Path(hooks.__file__).parents[1]


@pytest.fixture
def core_alone(monkeypatch):
    monkeypatch.setattr(hooks, "choosers", {})
    monkeypatch.setattr(hooks, "load_more", hooks.NOTHING)
    monkeypatch.setattr(hooks, "other_entry", hooks.NOTHING)
    monkeypatch.setattr(hooks, "guard", hooks._NoGuard)
    monkeypatch.setattr(hooks, "check_call", hooks.NOTHING)


@pytest.mark.usefixtures("core_alone")
def test_a_collective_runs_without_what_is_added_to_the_core():
    assert SimWorld(3).run(lambda comm: all_reduce(comm, np.full(2, comm.rank)).tolist()) == [[3, 3]] * 3
    for name in ("auto", "nowhere.py:f"):
        with pytest.raises(UsageError, match=f"unknown all_reduce algorithm '{name}'"):
            SimWorld(1).run(lambda comm, name=name: all_reduce(comm, np.ones(2), algorithm=name))


def test_more_algorithms_and_schedules_are_imported_once_when_a_name_is_not_there(monkeypatch):
    """The folder of schedules imports its files itself, before `import_modules` does."""
    import_module("minidist.pipeline.schedules")
    found = []
    monkeypatch.setattr(additions, "_LOADED", set())
    monkeypatch.setattr(extras, "import_modules", lambda package, *_, **__: found.append(package))
    assert "ring" in ALGORITHMS["all_reduce"]
    validate(get_schedule("1F1B").plan(2, 2))
    assert found == []
    for _ in range(2):
        with pytest.raises(UsageError, match="unknown all_reduce algorithm 'none'"):
            ALGORITHMS["all_reduce"]["none"]
        with pytest.raises(UsageError, match="unknown schedule 'none'"):
            get_schedule("none")
    assert found == ["minidist.collectives", "minidist.pipeline.schedules"]


def test_the_core_has_the_plan_of_a_gpt_and_refuses_what_is_not_added(monkeypatch):
    llama = Llama(LlamaConfig(7, 8, 8, 1, 2, max_position_embeddings=4))
    assert "model.layers.*.mlp.up_proj" in model_parallel.tensor_parallel_plan(llama)
    assert set(model_parallel.tensor_parallel_plan(MLP([4, 4, 2]))) == {"layers.0", "layers.1"}
    monkeypatch.setattr(hooks, "plan_of", hooks.NOTHING)
    assert "lm_head" in model_parallel.tensor_parallel_plan(GPT(GPTConfig(7, 4, 8, 1, 2)))
    for model in (llama, MLP([4, 4, 2])):
        with pytest.raises(UsageError, match=r"no tensor-parallel plan for a .*; pass one"):
            model_parallel.tensor_parallel_plan(model)
    with pytest.raises(UsageError, match=r"unknown attention 'rign'.*'ring'"):
        SimWorld(2).run(lambda comm: apply_context_parallel(GPT(GPTConfig(7, 4, 8, 1, 2)), comm, 4, "rign"))


def test_a_rule_of_updates_that_there_is_not_is_refused():
    plan = get_schedule("1F1B").plan(2, 2)
    with pytest.raises(UsageError, match="plan '1f1b' has updates='later'; it must be one of flush, none, stash"):
        validate(replace(plan, updates="later"))


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


def test_every_hook_of_the_core_is_set():
    """In a fresh process, because a test may have put another function in the place of one."""
    used = {name for path in CORE.rglob("*.py") for name in re.findall(r"\bhooks\.([a-z]\w*)", path.read_text())}
    program = (
        "import minidist; from minidist.core.base import hooks; print({n: str(v) for n, v in vars(hooks).items()})"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    values = ast.literal_eval(ran.stdout)
    del values["choosers"], values["backward_checks"], values["added"]
    assert len(used) > 45
    assert used - values.keys() == {"added", "backward_checks", "choosers", "py"}
    assert [name for name in used & values.keys() if "core.base.hooks" in values[name] or values[name] == "inf"] == []


UNUSED = """
import sys
import numpy as np
from minidist.core.autograd import Tensor
from minidist.core.nn import MLP
from minidist.core.optim import AdamW
model = MLP([4, 8, 2])
model(Tensor(np.ones((3, 4), np.float32))).sum().backward()
AdamW(model.parameters()).step()
print(*(m for m in sys.modules if m.startswith("minidist")))
"""


def test_a_step_on_one_device_loads_none_of_their_modules():
    ran = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    for name in ("base.device", "base.meta", "base.promise_fibers", "nn.describe", "nn.moving"):
        assert f"minidist.{name}" not in loaded, name
