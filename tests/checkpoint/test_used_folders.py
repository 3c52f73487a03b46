"""A folder that holds another run is not taken over without being asked for, and --resume continues what is there."""

import json
from functools import partial

import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.metrics import read_metrics
from minidist.job.train.trainer import train
from tests.cases import each

MLP = {"model": "mlp", "width": 8, "layers": 1, "global_batch": 4}


@pytest.fixture
def command(tmp_path, minidist):
    """`minidist train --json --save tmp_path/c` with more flags."""
    job = ["train", "--model", "mlp", "--width", "8", "--layers", "1", "--global-batch", "4", "--json"]
    return partial(minidist, *job, "--save", tmp_path / "c", "--trace", tmp_path / "trace.jsonl")


def test_a_new_run_does_not_move_latest(command, tmp_path):
    command("--steps", "4")
    said = command("--steps", "2", code=2).err
    assert "holds checkpoints of an earlier run (the last one is step-00000004); continue it with --resume" in said
    assert (tmp_path / "c" / "latest").read_text() == "step-00000004"

    # Asked for, the new run stands next to the old one.
    command("--steps", "2", "--overwrite")
    assert (tmp_path / "c" / "latest").read_text() == "step-00000002"
    assert (tmp_path / "c" / "step-00000004").is_dir()


def test_a_folder_whose_latest_is_gone_is_used_too(command, tmp_path):
    command("--steps", "1")
    (tmp_path / "c" / "latest").unlink()
    command("--steps", "1", code=2)


def test_metrics_of_a_resumed_job_continue_the_file(command, tmp_path):
    """Records of steps that were made after the last checkpoint are made again; a killed job's half line goes."""
    lines = tmp_path / "m.jsonl"
    whole = json.loads(command("--steps", "5", "--every", "2", "--metrics", lines).out)
    (tmp_path / "c" / "latest").write_text("step-00000002")
    with lines.open("a") as file:
        file.write('{"step": 5, "lo')
    before = lines.read_text().splitlines()[:2]
    resumed = json.loads(command("--steps", "6", "--resume", "--metrics", lines).out)
    assert [record["step"] for record in read_metrics(lines)] == [0, 1, 2, 3, 4, 5]
    assert [record["loss"] for record in read_metrics(lines)] == resumed["losses"]
    assert resumed["losses"][:5] == whole["losses"]
    assert lines.read_text().splitlines()[:2] == before

    # A resumed job may begin a file, and a new run begins anew.
    other = tmp_path / "other.jsonl"
    command("--steps", "7", "--resume", "--metrics", other)
    assert [record["step"] for record in read_metrics(other)] == [6]
    command("--steps", "1", "--overwrite", "--metrics", lines)
    assert [record["step"] for record in read_metrics(lines)] == [0]


def test_metrics_of_another_run_are_not_continued(command, tmp_path):
    mine, other = tmp_path / "mine.jsonl", tmp_path / "other.jsonl"
    command("--steps", "2", "--metrics", mine)
    command("--steps", "2", "--overwrite", "--seed", "5", "--metrics", other)
    before = mine.read_text()
    said = command("--steps", "3", "--resume", "--seed", "5", "--metrics", mine, code=2).err
    assert "is of another run: in step 0 its loss is" in said
    assert "choose another --metrics, or remove that file" in said
    assert mine.read_text() == before

    # Nor is a file without anything to compare, or one that was edited.
    for text, reason in (
        (before.replace('"step": ', '"step": 7'), "it has no record of the 2 steps that are resumed"),
        ('{"step": "x"}\n', 'line 1: \'{"step": "x"}\' is not a record of a step; remove the line'),
    ):
        mine.write_text(text)
        said = command("--steps", "3", "--resume", "--seed", "5", "--metrics", mine, code=2).err
        assert reason in said
        assert mine.read_text() == text
    command("--steps", "3", "--resume", "--seed", "5", "--metrics", other)
    assert [record["step"] for record in read_metrics(other)] == [0, 1, 2]


# --- the data of a resumed job ---


def text_job(path, **values):
    return TrainConfig.make(
        layers=1, width=8, heads=2, context=4, global_batch=2, data=f"text:{path}", **{"steps": 2, **values}
    )


def test_data_are_known_by_their_content(tmp_path, monkeypatch):
    """The same file by another path continues; a text with one changed byte does not."""
    text, folder = tmp_path / "my.txt", str(tmp_path / "c")
    text.write_bytes(b"some text to train on, over and over" * 20)
    monkeypatch.chdir(tmp_path)
    SimWorld(2).run(train, text_job("my.txt", save=folder))
    resumed = SimWorld(2).run(train, text_job(text, save=folder, resume=True, steps=3))
    assert resumed[0].first_step == 2

    edited = bytearray(text.read_bytes())
    edited[-1] ^= 1
    text.write_bytes(edited)
    with pytest.raises(
        UsageError, match=r"whose content was not that of --data text:my\.txt now; resume with the data as"
    ):
        SimWorld(2).run(train, text_job("my.txt", save=folder, resume=True, steps=4))


@each(("ranks", "settings"), [(1, {"evaluate_every": 1}), (2, {"strategy": "ps", "dp": 1})])
def test_the_held_out_part_counts_and_servers_compare_the_data_too(ranks, settings, tmp_path):
    text, folder = tmp_path / "my.txt", str(tmp_path / "c")
    text.write_bytes(b"some text to train on" * 20)
    SimWorld(ranks).run(train, text_job(text, save=folder, **settings))
    text.write_bytes(text.read_bytes()[:-1] + b"!")
    with pytest.raises(UsageError, match="whose content was not that of"):
        SimWorld(ranks).run(train, text_job(text, save=folder, **settings, resume=True, steps=3))
