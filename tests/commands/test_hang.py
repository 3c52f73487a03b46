"""`minidist hang`: the report, JSON, exit codes, and the corpus."""

import json

import pytest


def test_the_corpus_is_written_and_read(tmp_path, minidist):
    out = minidist("hang", tmp_path, "--write", "--ranks", "2,3", "--form", "json").out
    assert out.splitlines() == [f"written: 14 jobs that hang, and {tmp_path / 'labels.json'}"]
    one = tmp_path / "skipped-collective-3"
    assert "ranks 0, 1 wait in all_reduce number 3" in minidist("hang", one, code=1).out
    assert json.loads(minidist("hang", one, "--json", code=1).out)["suspects"] == [2]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["none"], "cannot be read"),
        (["none", "--ranks", "2,4"], "it must be one number"),
        (["none", "--form", "json"], "--form is of --write"),
    ],
)
def test_wrong_input_ends_with_2(words, part, minidist):
    out, err = minidist("hang", *words, code=2)
    assert out == ""
    assert part in err
