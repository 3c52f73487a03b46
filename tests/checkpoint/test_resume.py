"""A resumed job continues with the same bits on the same layout, and on any other layout in its tier."""

import json
from types import SimpleNamespace

import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Checkpoint
from minidist.job.checkpoint.resume import job_state, same_job
from minidist.job.config.models import llama_inner
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build
from minidist.job.train.trainer import train
from tests.jobs import SMALL_GPT

GPT = SMALL_GPT | {"clip": 0.5, "dropout": 0.1, "global_batch": 8, "warmup": 3, "reduction": "ordered"}


def run(ranks, **values):
    return SimWorld(ranks).run(train, TrainConfig.make(**{**GPT, **values}))


LATE = """
from minidist.base.coordinates import current_coordinates
from minidist.core.nn import Linear, Module

class Late(Module):
    def __init__(self, data):
        self.main, self.branch = (Linear(data.features, data.classes) for _ in range(2))
        self.initialize(0)

    def forward(self, x):
        return self.main(x) + self.branch(x) if current_coordinates().step >= 3 else self.main(x)

def net(config, data):
    return Late(data)
"""


@pytest.mark.parametrize("outer", ["none", "nesterov"])
@pytest.mark.parametrize("done", [2, 4])
def test_a_branch_in_use_from_the_fourth_step_on_has_its_own_count_after_a_resume(outer, done, tmp_path):
    """Replicas that train alone need no gradient of every parameter; before its first step the branch has no state."""
    (tmp_path / "late.py").write_text(LATE)
    job = {"model": f"{tmp_path}/late.py:net", "data": "glyphs", "global_batch": 8, "optimizer": "adamw", "steps": 6}
    job |= {"local_steps": 2, "outer_optimizer": outer, "reduction": "ordered"}

    def run_late(**more):
        return SimWorld(2).run(train, TrainConfig.make(**job, **more))

    whole = run_late()
    run_late(save=str(tmp_path / "a"), every=2)
    (tmp_path / "a" / "latest").write_text(f"step-{done:08d}")
    counts = Checkpoint(tmp_path / "a").state["optimizer_counts"]
    assert counts == dict.fromkeys(["branch.weight", "branch.bias"], max(0, done - 3))
    resumed = run_late(save=str(tmp_path / "a"), resume=True)
    assert [r.digest for r in resumed] == [r.digest for r in whole]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_next_steps_have_the_bits_of_the_uninterrupted_run(zero, ranks, tmp_path):
    layout = {"zero": zero, "accumulation": 2}
    whole = run(ranks, steps=5, **layout)
    run(ranks, steps=5, save=str(tmp_path / "a"), every=2, **layout)
    (tmp_path / "a" / "latest").write_text("step-00000002")
    resumed = run(ranks, steps=5, save=str(tmp_path / "a"), resume=True, **layout)
    assert [r.digest for r in resumed] == [r.digest for r in whole]
    assert resumed[0].losses == whole[0].losses
    assert resumed[0].first_step == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 32}, "--width 16"),
        ({"seed": 1}, "--seed 0"),
        ({"optimizer": "sgd"}, "--optimizer adamw"),
        ({"global_batch": 4}, "--global-batch 8"),
        ({"steps": 2}, "raise --steps above 2"),
    ],
)
def test_another_job_is_refused(change, sentence, tmp_path):
    run(2, steps=2, save=str(tmp_path))
    with pytest.raises(UsageError, match=sentence):
        run(2, **{"steps": 4, "save": str(tmp_path), "resume": True, **change})


def test_the_command_line(tmp_path, minidist):
    job = ["train", "--dp", "2", "--zero", "3", "--width", "16", "--heads", "2", "--context", "8", "--json"]
    job += ["--save", str(tmp_path / "c"), "--trace", str(tmp_path / "trace.jsonl")]
    first = json.loads(minidist(*job, "--steps", "3", "--every", "2").out)
    second = json.loads(minidist(*job, "--steps", "4", "--resume").out)
    assert second["losses"][:3] == first["losses"]
    assert len(second["losses"]) == 4
    for volume in second["bytes_by_purpose"].values():
        assert volume["measured"] == volume["closed_form"]
    assert (tmp_path / "c" / "latest").read_text() == "step-00000004"


def test_a_setting_that_the_checkpoint_is_too_old_for_has_its_default():
    config = TrainConfig.make(**GPT, steps=5)
    job = build(config, resolve_batches(config, 1))
    state = job_state(job, 2, [1.0, 1.0], 2, {})
    del state["config"]["evaluate_every"]
    checkpoint = SimpleNamespace(path="old", step=2, state=state)
    same_job(checkpoint, job)
    other = config.model_copy(update={"evaluate_every": 2})
    with pytest.raises(
        UsageError, match="was made with --evaluate-every None, this job has 2; leave out --evaluate-every"
    ):
        same_job(checkpoint, build(other, resolve_batches(other, 1)))


def test_another_number_of_steps_between_evaluations_changes_no_number(tmp_path):
    whole = run(2, steps=4, evaluate_every=2)[0]
    run(2, steps=2, evaluate_every=2, save=str(tmp_path))
    resumed = run(2, steps=4, evaluate_every=1, save=str(tmp_path), resume=True)[0]
    assert (resumed.digest, resumed.losses) == (whole.digest, whole.losses)
    assert resumed.held_out[4] == whole.held_out[4]
    with pytest.raises(UsageError, match="resume with --evaluate-every 1"):
        run(2, steps=5, save=str(tmp_path), resume=True)


def folders(path):
    return sorted(folder.name for folder in path.iterdir() if folder.is_dir())


def test_the_last_checkpoints_are_kept_also_by_a_resumed_run_and_none_of_another(tmp_path):
    run(1, steps=2, every=1, save=str(tmp_path), seed=5)  # another run
    run(2, steps=5, every=1, keep=2, save=str(tmp_path), overwrite=True)
    assert folders(tmp_path) == ["step-00000001", "step-00000002", "step-00000004", "step-00000005"]
    run(2, steps=7, every=1, keep=2, save=str(tmp_path), resume=True)
    assert folders(tmp_path) == ["step-00000001", "step-00000002", "step-00000006", "step-00000007"]
    assert (tmp_path / "latest").read_text() == "step-00000007"
    whole = run(2, steps=8)[0]
    assert run(2, steps=8, save=str(tmp_path), resume=True)[0].digest == whole.digest


def test_a_run_continues_from_a_step(tmp_path):
    whole = run(2, steps=4, every=1, save=str(tmp_path))[0]
    again = run(2, steps=4, every=1, save=str(tmp_path), resume=True, from_step=2, clip=0.01)[0]
    assert again.first_step == 2
    assert again.losses[:3] == whole.losses[:3]
    assert again.digest != whole.digest
    assert (tmp_path / "latest").read_text() == "step-00000004.1"
    # Of two checkpoints of a step, the one that was saved last.
    assert run(2, steps=5, save=str(tmp_path), resume=True, from_step=3)[0].losses[3] == again.losses[3]
    with pytest.raises(
        UsageError, match=r"checkpoint of step 9 does not exist in .*; it has those of steps 1, 2, 3, 4, 5"
    ):
        run(2, steps=5, save=str(tmp_path), resume=True, from_step=9)


def test_a_checkpoint_that_is_deleted_in_part_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed before anything is deleted
    run(1, steps=3, every=1, keep=1, save=str(tmp_path))
    assert [name for name in folders(tmp_path) if name.startswith("step")] == ["step-00000003"]
    monkeypatch.undo()
    run(1, steps=4, every=1, keep=1, save=str(tmp_path), resume=True)
    assert folders(tmp_path) == ["step-00000004"]


def test_the_width_of_a_llama_is_compared_as_a_number(tmp_path):
    """Given or not, the same width is the same model, and a sentence says the numbers."""
    llama = {"model": "llama", "dropout": 0.0}
    run(1, steps=2, save=str(tmp_path / "a"), **llama)
    width = llama_inner(TrainConfig.make(**{**GPT, **llama}))
    resumed = run(1, steps=3, save=str(tmp_path / "a"), resume=True, ffn=width, **llama)
    assert resumed[0].first_step == 2
    with pytest.raises(
        UsageError, match=f"made with --ffn {width}, this job has {width + 1}; resume with --ffn {width}"
    ):
        run(1, steps=4, save=str(tmp_path / "a"), resume=True, ffn=width + 1, **llama)


def test_a_batch_plan_has_a_batch_for_every_step(tmp_path, monkeypatch):
    """Damage that a checksum does not see: written by another program."""
    values = {**GPT, "dp": 2, "adaptive_batch": 16, "save": str(tmp_path)}
    SimWorld(2).run(train, TrainConfig.make(**values, steps=3))
    checkpoint = Checkpoint(tmp_path)
    checkpoint.state["batch_plan"]["samples"].append(8)
    monkeypatch.setattr("minidist.job.checkpoint.resume.Checkpoint", lambda *_, **__: checkpoint)
    with pytest.raises(UsageError, match=r"does not describe a job \(it has 4 batches of 3 steps\)"):
        SimWorld(2).run(train, TrainConfig.make(**values, steps=4, resume=True))
