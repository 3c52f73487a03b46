"""The list of planted bugs is applicable: `make mutants`, which takes minutes, finds each of them in its place."""

import sys
from functools import cache
from pathlib import Path

import pytest

from tests.cases import each
from tests.mutants import mutants_run
from tests.mutants.mutants_run import ROOT, Copy, Mutant, mutants, outcome, table

MUTANTS = mutants()
START, END = "<!-- mutants: python -m tests.mutants.mutants_run --table -->\n", "<!-- end of mutants -->"


@cache
def source_of(path):
    return (ROOT / path).read_text(encoding="utf-8")


def without_comments(text):
    """Lines as Python reads them; in the texts that are planted no string has a #."""
    return [line.partition("#")[0].rstrip() for line in text.splitlines()]


@each("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.why}")
def test_a_mutant_still_applies(mutant):
    """Its text is found exactly once, the result is other code, and Python, and its test exists."""
    assert without_comments(mutant.find) != without_comments(mutant.replace)
    compile(mutant.planted(source_of(mutant.path)), mutant.path, "exec")
    file, _, name = mutant.test.partition("::")
    assert f"\ndef {name.partition('[')[0]}(" in source_of(file)


def test_the_list_is_long_and_reaches_every_package_that_trains():
    assert len(MUTANTS) >= 120
    assert len({mutant.why for mutant in MUTANTS}) == len(MUTANTS)
    packages = {mutant.file.split("/")[0] for mutant in MUTANTS}
    modules = {path.name for path in (ROOT / "minidist").iterdir() if (path / "__init__.py").exists()}
    assert modules == packages


def test_the_table_is_current():
    """docs/guarantees.md has what `python -m tests.mutants.mutants_run --table` prints."""
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert page.partition(START)[2].partition(END)[0].strip() == table(MUTANTS)


def test_only_a_test_that_fails_counts_as_killed():
    assert {code: outcome(code) for code in (0, 1, 124)} == {0: "survived", 1: "killed", 124: "ran too long"}
    assert outcome(2).startswith("broken")  # an import that fails, an interrupt
    assert outcome(5).startswith("broken")  # no test of that name


def test_a_mutant_is_planted_in_a_copy_and_taken_out_again(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants_run, "COPIED", ("minidist/core/base", "pyproject.toml"))
    (tmp_path / "minidist" / "core").mkdir(parents=True)
    copy, mutant = Copy(tmp_path), Mutant("core/base/layout.py", "def offsets(", "def offset(", "", "")
    before = (ROOT / mutant.path).read_text(encoding="utf-8")
    compiled = tmp_path / "minidist" / "core" / "base" / "__pycache__" / f"layout.{sys.implementation.cache_tag}.pyc"
    compiled.parent.mkdir()
    compiled.write_bytes(b"old")
    with copy.planted(mutant):
        assert "def offset(" in (tmp_path / mutant.path).read_text(encoding="utf-8")
        assert not compiled.exists()
    assert (tmp_path / mutant.path).read_text(encoding="utf-8") == before
    assert (ROOT / mutant.path).read_text(encoding="utf-8") == before


@pytest.mark.parametrize("find", ["no such text", "return"])
def test_a_text_that_is_not_found_once_is_refused(find):
    with pytest.raises(ValueError, match="exactly one place"):
        Mutant("core/base/layout.py", find, "x", "", "").planted(
            Path(ROOT / "minidist/core/base/layout.py").read_text()
        )
