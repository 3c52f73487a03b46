"""The ending of the name after -o or --picture decides what is written; another is one sentence, before any work."""

import json
from pathlib import Path
from typing import get_args

import pytest

from minidist import cli
from minidist.base.file_format import format_of
from tests.commands.test_flags import commands, options

PLAN = ["--stages", "2", "--microbatches", "2"]
TINY = ["--layers", "1", "--width", "8", "--heads", "2", "--context", "4", "--data", "markov"]
CLUSTER = ["--model", "gpt2", "--gpu", "a100-80gb", "--seq", "64", "--ranks", "2", "--global-batch", "4"]
BEGINS = {
    ".svg": b"<?xml",
    ".pdf": b"%PDF",
    ".png": b"\x89PNG",
    ".html": b"<!doctype html>",
    ".htm": b"<!doctype html>",
    ".csv": b"",
    ".json": b"",
    ".txt": b"",
    ".xml": b"<?xml",
    ".gift": b"::1 ",
    ".zip": b"PK",
    ".gif": b"GIF89a",
}
PICTURES = (".svg", ".pdf", ".png")
# Every command that writes a file with a format: the rest of its command line, its flag, and the endings.
CASES = {
    "schedule": (["1f1b", *PLAN], "-o", (".txt", ".csv", ".json", *PICTURES, ".html", ".htm")),
    "report": (["t.jsonl"], "-o", (*PICTURES, ".json", ".html", ".htm", ".gif")),
    "plan": (CLUSTER, "-o", PICTURES),
    "memory": (["--params", "1e6"], "-o", PICTURES),
    "tiles": ([], "-o", PICTURES),
    "staleness": (["asp", "--seconds", "0.01"], "-o", PICTURES),
    "museum": (["5", "--no-tests"], "-o", PICTURES),
    "profile": ([*TINY, "--rounds", "1"], "-o", (".json",)),
    "bench collectives": (["--simulated", "--ranks", "2", "--sizes", "4,64"], "--picture", PICTURES),
    "lesson quiz": (["--questions", "1"], "-o", (".csv", ".gift", ".zip", ".xml")),
    "lesson autograder": (["17"], "-o", (".zip", ".json")),
    "lesson slides": (["90", "--folder", "lessons"], "-o", (".html",)),
}
EVERY = [(command, ending) for command, (_, _, endings) in CASES.items() for ending in endings]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a trace and a lesson."""
    folder = tmp_path_factory.mktemp("endings")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", *TINY, "--dp", "2", "--steps", "1", "--trace", str(folder / "t.jsonl")])
    assert not end.value.code
    (folder / "lessons").mkdir()
    (folder / "lessons" / "90_tiny.py").write_text("# %% [markdown]\n# # 90 Tiny\n# Text.\n\n# %%\nprint(1)\n")
    return folder


@pytest.fixture
def run(work, monkeypatch, minidist):
    """`minidist` in the folder of `work`."""
    monkeypatch.chdir(work)
    return minidist


def test_every_command_that_writes_to_a_name_has_a_case():
    folders = {"lesson build", "lesson instructor"}
    found = {
        " ".join(words)
        for words, function in commands()
        for _, kind, info in options(function)
        if Path in (kind, *get_args(kind)) and {"--output", "--picture"} & {*info.names, f"--{_}"}
    }
    assert found - folders == set(CASES)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("command", "ending"), EVERY, ids=str)
def test_the_ending_decides_what_is_written(command, ending, run):
    words, flag, _ = CASES[command]
    name = f"{command.replace(' ', '-')}{ending}"
    assert f"written: {name}" in run(*command.split(), *words, flag, name).err
    written = Path(name).read_bytes()
    assert written[:15].lower().startswith(BEGINS[ending].lower())
    if ending == ".json":
        json.loads(written)


@pytest.mark.parametrize("command", CASES)
@pytest.mark.parametrize("name", ["x.docx", "nothing"])
def test_an_unknown_ending_is_one_sentence_with_those_there_are(command, name, run):
    words, flag, endings = CASES[command]
    # What would be computed first is absent or too large: the sentence comes before that.
    late = {"report": ["absent.jsonl"], "museum": ["1"], "lesson slides": ["90", "--folder", "absent"]}
    said = run(*command.split(), *late.get(command, words), flag, name, code=2).err
    assert said.count("\n") == 1, said
    assert said.startswith(f"minidist: --{'picture' if flag == '--picture' else 'output'} '{name}': ")
    assert all(ending in said for ending in endings)
    assert not Path(name).exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["schedule", "1f1b", *PLAN, "--format", "csv"], "a.svg"),
        (["schedule", "1f1b", *PLAN, "--format", "svg"], "a.txt"),
        (["schedule", "1f1b", *PLAN, "--json"], "a.svg"),
        (["memory", "--params", "1e6", "--format", "text"], "a.svg"),
        (["report", "t.jsonl", "--picture", "perfetto"], "a.svg"),
        (["report", "t.jsonl", "--picture", "page"], "a.svg"),
        (["report", "t.jsonl", "--picture", "lanes"], "a.html"),
        (["report", "t.jsonl", "--format", "hta"], "a.svg"),
        (["report", "t.jsonl", "--format", "gif"], "a.svg"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_a_format_that_contradicts_the_ending_is_one_sentence(words, name, run):
    said = run(*words, "-o", name, code=2).err
    assert said.count("\n") == 1, said
    assert "contradicts" in said
    assert f"--output '{name}'" in said
    assert not Path(name).exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["schedule", "pipedream", *PLAN, "--format", "versions"], "v.png"),
        (["schedule", "1f1b", *PLAN, "--format", "perfetto"], "p.json"),
        (["schedule", "1f1b", *PLAN, "--json"], "j.json"),
        (["memory", "--params", "1e6", "--format", "svg"], "m.png"),
        (["report", "t.jsonl", "--picture", "lanes"], "l.png"),
        (["report", "t.jsonl", "--picture", "steps"], "s.html"),
        (["report", "t.jsonl", "--format", "gif"], "s.gif"),
        (["schedule", "1f1b", *PLAN], "s.html"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_a_format_that_agrees_with_the_ending_chooses_among_those_of_the_ending(words, name, run):
    run(*words, "-o", name)
    assert Path(name).read_bytes().startswith(BEGINS[Path(name).suffix])
    if name == "p.json":
        assert "traceEvents" in json.loads(Path(name).read_text())


def test_an_output_without_a_plan_is_not_forgotten(run):
    run("schedule", "-o", "all.txt", code=2)
    run("report", "t.0.et", "-o", "a.svg", code=2)


def test_a_device_takes_the_format_that_is_asked_for():
    assert format_of(Path("/dev/null"), None, {"text": (".txt",)}, "text") == "text"
    assert format_of(Path("/dev/null"), "svg", {"text": (".txt",), "svg": (".svg",)}, "text") == "svg"
