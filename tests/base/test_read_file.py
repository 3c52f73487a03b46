"""Reading a user's file: every limit is one sentence, whichever command reads it."""

import json
import re
from pathlib import Path

import pytest

import minidist
from minidist.base.read_file import MAX_DEPTH, check_path, parse_json, parse_toml, read_json, read_text, read_toml
from minidist.base.trace_file import read_traces
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint.directory import Checkpoint
from minidist.pipeline.schedules import read_csv
from tests.cases import each


@each(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 2, "c": 3}}', "the key 'c' appears twice"),
        ("[" * 100_000, "levels"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "levels"),
        ("NaN", "NaN is not a number of JSON"),
        ("[-Infinity]", "-Infinity is not a number of JSON"),
        ("1e400", "too large"),
        ("1" + "0" * 5_000, "a whole number of 5,001 digits"),
        ("1" + "0" * 35, "too large"),
        ("{", "Expecting"),
    ],
)
def test_json_that_is_refused(text, reason, tmp_path):
    """A number that is refused is its text in the file of another program, where nothing may read it."""
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    (tmp_path / "a.json").write_text(text)
    if re.search("number|digits|large", reason):
        found = read_json(tmp_path / "a.json", "--config", "correct it")
        assert found in (text, [text.strip("[]")])
        return
    with pytest.raises(UsageError, match="is not JSON") as error:
        read_json(tmp_path / "a.json", "--config", "correct it")
    assert len(str(error.value)) < 400


@each(
    ("text", "reason"),
    [
        ("a = " + "[" * 20_000, "characters"),
        ("a = " + "[" * 900, "levels|Invalid"),
        ("a = " + "9" * 900, "too large"),
        ("a." * 400 + "b = 1", "levels"),
        ("a = 1\na = 2", "overwrite"),
        ("d = 2024-13-45", "out of range|Expected newline"),
    ],
)
def test_toml_that_is_refused(text, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        parse_toml(text)
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UsageError, match="is not TOML"):
        read_toml(tmp_path / "a.toml", "--config", "correct it")


def test_no_other_module_parses_json_or_toml():
    """So that every file, and every line of one, has the limits above.

    setup.py reads the notebooks of the lessons with handout.py, where no other module can be imported.
    """
    parsing = re.compile(r"\bjson\.loads?\(|JSONDecoder|\btomllib\b|\bcsv\.reader|\byaml\b")
    package = Path(minidist.__file__).parent
    found = [path.name for path in package.rglob("*.py") if parsing.search(path.read_text(encoding="utf-8"))]
    assert sorted(found) == ["handout.py", "read_file.py"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[" * 10_000, "levels"), ('{"ranks": 1e400}', "first line"), ('{"a": 1, "a": 2}', "appears twice")],
)
def test_a_trace_and_a_checkpoint_are_read_by_it(text, reason, tmp_path):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_traces(tmp_path / "t.jsonl")
    (tmp_path / "metadata.json").write_text(text)
    (tmp_path / "latest").write_text(".")
    with pytest.raises(UsageError, match="is missing or damaged"):
        Checkpoint(tmp_path.parent, tmp_path.name)


def test_a_plan_of_endless_lines_is_not_read_to_its_end():
    with pytest.raises(UsageError, match="the plan '/dev/zero' has more than 16,000,000 bytes; give a CSV file"):
        read_csv("/dev/zero")


def test_what_is_right_is_read(tmp_path):
    content = {"a": [1, 2.5, None, True, "x"], "b": {"c": {}}}
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(content), encoding="utf-8")
    assert read_json(tmp_path / "a.json", "--config", "correct it") == content
    assert parse_json("[NaN, Infinity, 1e35]", any_float=True)[1:] == [float("inf"), 1e35]
    assert parse_toml("[a]\nb = inf") == {"a": {"b": float("inf")}}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("none.json", "No such file"),
        ("a\0b", "no path can have"),
        ("a\ud800b", "no path can have"),
        ("/dev/zero", "more than 16,000,000 bytes"),
        ("x" * 5_000, "name too long"),
    ],
)
def test_files_that_cannot_be_read(path, reason):
    with pytest.raises(UsageError, match=reason) as error:
        read_text(path, "--config", "name another file")
    assert len(str(error.value)) < 400


def test_bytes_that_are_not_utf_8(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UsageError, match="not UTF-8 at byte 7"):
        read_text(tmp_path / "a.json", "--config", "write it in UTF-8")
    assert check_path("caf\udce9", "--config").name == "caf\udce9"
