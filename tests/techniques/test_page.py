"""docs/techniques.md has a row for each folder of techniques, written from the docstring of its extension.py."""

import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from minidist.techniques import installed
from tests.cases import absent_folders

ROOT = Path(__file__).parents[2]
SCRIPT = spec_from_file_location("techniques_table", ROOT / "docs" / "techniques_table.py")
table = module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(table)


def test_the_page_has_the_rows_of_all_folders():
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.START in page
    assert table.END in page
    for folder in absent_folders():
        page = re.sub(rf"\|.*\]\(\.\./{folder}\) \|.*\n", "", page)
    assert page == table.document(page), "run python docs/techniques_table.py"
    rows = page.partition(table.START)[2].partition(table.END)[0].count("](../minidist/techniques/")
    assert rows == len(installed())


def test_the_flags_of_a_row_are_those_of_the_technique():
    for kind in installed():
        flags = {f"--{name.replace('_', '-')}" for name in kind.Settings.model_fields}
        first = table.row(ROOT / (kind.__module__.replace(".", "/") + ".py")).partition(" | ")[0]
        assert not flags or any(f"`{flag}" in first for flag in flags) or kind.switches, first


def test_lessons_and_tests_of_a_row_exist():
    for kind in installed():
        row = table.row(ROOT / (kind.__module__.replace(".", "/") + ".py"))
        links = [part.partition(")")[0] for part in row.split("](../")[1:]]
        assert len(links) >= 2
        assert [link for link in links if not (ROOT / link).exists()] == []


def test_what_is_wrong_with_the_page_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="has no place for the table; add the two comments <!-- from here on"):
        table.document("# Techniques")
    (tmp_path / "docs").mkdir()
    copy = shutil.copy(SCRIPT.origin, tmp_path / "docs")
    ended = subprocess.run([sys.executable, copy], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.fullmatch(r"techniques_table.py: .*No such file or directory: '.*techniques.md'\n", ended.stderr)


def test_a_docstring_without_the_fields_is_an_error(tmp_path):
    (tmp_path / "extension.py").write_text('"""`--x`: it is.\n\nProved by: tests/x.py\n"""\n')
    with pytest.raises(ValueError, match="A rank sends per step"):
        table.row(tmp_path / "extension.py")
