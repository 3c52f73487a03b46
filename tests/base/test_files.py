"""Every file that a user asks for: a full disk and a missing permission are one sentence with the path and a remedy."""

import os
from pathlib import Path

import pytest

from minidist.base.files import writing
from minidist.base.trace_file import read_traces, write_traces
from minidist.base.traces import Trace
from minidist.comm import SimWorld
from minidist.comm.launching import execute
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Storage
from minidist.report.frame import save
from minidist.report.page import write_page
from tests.checkpoint.test_directory import assert_holds, write

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full, which is always full")
JOB = ["train", "--dp", "2", "--model", "mlp", "--width", "8", "--steps", "2", "--global-batch", "8"]


def test_the_sentence_has_what_why_and_remedy():
    sentence = r"^the list cannot be written to x: No space left on device; use y$"
    with pytest.raises(UsageError, match=sentence), writing("the list", "x", "use y"):
        raise OSError(28, "No space left on device")
    with pytest.raises(UsageError, match="cannot be written to x: of another kind; use y"), writing("it", "x", "use y"):
        raise OSError("of another kind")


@needs_full
@pytest.mark.parametrize("flag", ["--trace", "--metrics"])
def test_a_full_disk_while_training(flag, minidist, tmp_path):
    files = {"--trace": str(tmp_path / "t.jsonl"), flag: "/dev/full"}
    said = minidist(*JOB, *(word for pair in files.items() for word in pair), code=2).err
    assert f"cannot be written to /dev/full: No space left on device; make room there, or choose another {flag}" in said


@needs_full
@pytest.mark.parametrize(
    "command",
    [
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "2"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--format", "svg"],
        ["profile", "--layers", "1", "--width", "8", "--heads", "2", "--context", "4", "--rounds", "1"],
    ],
    ids=lambda words: " ".join(words[:1] + words[6:8]),
)
def test_a_full_disk_of_output(command, minidist):
    said = minidist(*command, "-o", "/dev/full", code=2).err
    assert (
        "cannot be written to /dev/full: No space left on device; make room there, or choose another --output" in said
    )


@needs_full
@pytest.mark.parametrize(
    ("picture", "suffix"), [("page", ".html"), ("perfetto", ".json"), ("bytes-by-purpose", ".svg")]
)
def test_a_full_disk_of_a_report(picture, suffix, minidist, tmp_path):
    trace, out = write_traces(tmp_path / "t.jsonl", [Trace()]), tmp_path / f"full{suffix}"
    out.symlink_to("/dev/full")
    said = minidist("report", str(trace), "--picture", picture, "-o", str(out), code=2).err
    assert "No space left on device; make room there, or choose another --output" in said


OWN = "a user's own work\n"
PLAN = ["gpipe", "--stages", "2", "--microbatches", "2"]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--trace", JOB),
        ("--metrics", JOB),
        ("--trace", ["compare", *JOB[1:]]),
        ("--output", ["report", "TRACE", "--picture", "perfetto"]),
        ("--output", ["schedule", *PLAN]),
        ("--output", ["schedule", *PLAN, "--format", "perfetto"]),
        ("--output", ["profile", "--layers", "1", "--width", "8", "--heads", "2", "--context", "4", "--rounds", "1"]),
    ],
    ids=lambda words: words if isinstance(words, str) else words[0],
)
def test_a_file_of_the_user_is_not_overwritten(flag, words, minidist, tmp_path, monkeypatch):
    """What minidist wrote there before is replaced; a notebook, or a file that a checkpoint needs, is not."""
    monkeypatch.chdir(tmp_path)
    write_traces("TRACE", [Trace()])
    for _ in range(2):
        minidist(*words, flag, "mine.json")
    Path("mine.json").write_text(OWN)
    said = minidist(*words, flag, "mine.json", code=2).err
    assert f"{flag} 'mine.json' exists already and is not a file that minidist has written there" in said
    assert said.count("\n") == 1
    assert Path("mine.json").read_text() == OWN


@pytest.mark.parametrize("name", ["page.html", "a.svg", "a.pdf", "a.png"])
def test_a_picture_of_the_user_is_not_overwritten(name, tmp_path, monkeypatch):
    from matplotlib.figure import Figure  # a quarter of a second, which most workers need not spend

    monkeypatch.chdir(tmp_path)
    figure = Figure(figsize=(1, 1))
    for _ in range(2):  # the second one over the first one
        write_page(name, [Trace()], {}) if name == "page.html" else save(figure, name)

    # One that another program has drawn.
    if name == "page.html":
        Path(name).write_text("<!doctype html>\n<title>my page</title>")
    else:
        figure.savefig(name)
    own = Path(name).read_bytes()
    with pytest.raises(UsageError, match=f"^--output '{name}' exists already and is not a file that minidist has"):
        write_page(name, [Trace()], {}) if name == "page.html" else save(figure, name)
    assert Path(name).read_bytes() == own


def test_other_rows_of_a_schedule_are_not_overwritten(minidist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["schedule", *PLAN, "--format", "csv", "-o", "plan.csv"]
    for _ in range(2):
        minidist(*words)
    Path("plan.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    said = minidist(*words, code=2).err
    assert "--output 'plan.csv' exists already with other rows, and a CSV file does not say whether" in said
    assert Path("plan.csv").read_text().startswith("0F0,0F1,0B0")


def test_the_trace_of_a_program_overwrites_no_file_of_the_user(tmp_path):
    (tmp_path / "mine.ipynb").write_text(OWN)
    with pytest.raises(UsageError, match=r"^--trace '.*mine.ipynb'.* exists already"):
        execute(lambda comm: comm.rank, ranks=2, trace=str(tmp_path / "mine.ipynb"))
    # The beginning of a trace, which a full disk has left, is no loss.
    (tmp_path / "t.jsonl").write_text('{"form')
    execute(lambda comm: comm.rank, ranks=2, trace=str(tmp_path / "t.jsonl"))
    assert len(read_traces(tmp_path / "t.jsonl")[0]) == 2


def test_metrics_and_trace_cannot_be_one_file(minidist, tmp_path):
    said = minidist(*JOB, "--trace", str(tmp_path / "a"), "--metrics", str(tmp_path / "x" / ".." / "a"), code=2).err
    assert "--metrics and --trace are the same file" in said


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(minidist, tmp_path):
    tmp_path.chmod(0o500)
    said = minidist(*JOB, "--save", str(tmp_path / "c"), code=2).err
    assert "Permission denied" in said


class Full(Storage):
    """A disk that is full from the `at`-th write on: half of the file is written."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def sync(self, descriptor):
        self.count += 1
        if self.count > self.at:
            raise OSError(28, "No space left on device")
        super().sync(descriptor)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fills_while_a_checkpoint_is_written(rank, tmp_path):
    """At each write of either rank: one sentence, and the checkpoint before it is as it was."""
    SimWorld(2).run(write, tmp_path, 1)
    sentence = f"^rank {rank}: the checkpoint of step 2 cannot be written to .*: No space left on device; make room"
    # Two files; of rank 0 also the metadata, the folder's name, `latest` and its name.
    for at in range(6 if rank == 0 else 2):
        storage = Full(at)
        with pytest.raises(UsageError, match=sentence):
            SimWorld(2).run(lambda comm, s=storage: write(comm, tmp_path, 2, s if comm.rank == rank else None))
        assert storage.count == at + 1
        assert_holds(tmp_path, 1 if (tmp_path / "latest").read_text() == "step-00000001" else 2)

    # With room again, nothing of these attempts is left.
    SimWorld(2).run(write, tmp_path, 2)
    assert_holds(tmp_path, 2)
    assert not list(tmp_path.glob(".saving*"))
