"""`minidist hang`: the report, JSON and exit codes."""

import json

import pytest

from tests.flight_recorder.corpus import CASES, hanging_world
from tests.flight_recorder.write import write_dumps


def test_dumps_are_read_and_the_exit_code_says_that_the_job_hangs(tmp_path, minidist):
    write_dumps(hanging_world(CASES["skipped-collective"], 3), tmp_path / "dumps")
    assert "ranks 0, 1 wait in all_reduce number 3" in minidist("hang", tmp_path / "dumps", code=1).out
    found = json.loads(minidist("hang", tmp_path / "dumps", "--json", "--ranks", "3", code=1).out)
    assert found["suspects"] == [2]


@pytest.mark.parametrize(
    ("words", "part"),
    [(["none"], "cannot be read"), (["none", "--ranks", "0"], "--ranks is 0; it must be from 1 to 1,000,000")],
)
def test_wrong_input_ends_with_2(words, part, minidist):
    out, err = minidist("hang", *words, code=2)
    assert out == ""
    assert part in err
