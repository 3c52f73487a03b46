"""docs/three_sizes.md shows what its commands print."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "three_sizes.md").read_text(encoding="utf-8")
SHOWN = [
    (command, lines.splitlines())
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.S)
    for command, lines in re.findall(r"^\$ minidist (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.M)
]


def test_the_page_has_all_three_sizes():
    assert len(SHOWN) == 7


@pytest.mark.parametrize(("command", "lines"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(command, lines, tmp_path, monkeypatch, minidist):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama7b.json").write_text(re.search(r"```json\n(.*?)```", PAGE, flags=re.S)[1])
    printed = minidist(*command.split()).out.splitlines()
    assert [line for line in lines if line not in printed] == []
