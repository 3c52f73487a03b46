"""`minidist hang`: the report, JSON, exit codes, and the corpus."""

import json

import pytest

from minidist import cli


def run(capsys, *words):
    """(exit code, standard output, standard error) of `minidist hang`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["hang", *map(str, words)])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_the_corpus_is_written_and_read(tmp_path, capsys):
    code, out, _ = run(capsys, tmp_path, "--write", "--ranks", "2,3", "--form", "json")
    assert (code, out.splitlines()) == (0, [f"written: 14 jobs that hang, and {tmp_path / 'labels.json'}"])
    code, out, _ = run(capsys, tmp_path / "skipped-collective-3")
    assert code == 1
    assert "ranks 0, 1 wait in all_reduce number 3" in out
    code, out, _ = run(capsys, tmp_path / "skipped-collective-3", "--json")
    assert (code, json.loads(out)["suspects"]) == (1, [2])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["none"], "cannot be read"),
        (["none", "--ranks", "2,4"], "it must be one number"),
        (["none", "--form", "json"], "--form is of --write"),
    ],
)
def test_wrong_input_ends_with_2(words, part, capsys):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert part in err
