"""Entries are found by name and alias, a wrong name says the nearest one, and a package's files add themselves."""

import sys

import pytest

from minidist.base.extras import import_modules
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.registry import Registry


def test_names_and_aliases_find_the_entry_and_a_wrong_name_says_the_nearest():
    registry = Registry("schedule")
    registry.add("gpipe", 1, aliases=("GPipe", "AFAB"))
    registry.add("1f1b", 2)
    assert (registry["gpipe"], registry["GPIPE"], registry["afab"], registry["1F1B"]) == (1, 1, 1, 2)
    assert sorted(registry) == ["1f1b", "gpipe"]
    with pytest.raises(UsageError, match=r"^'mine\.py' names no function; write FILE\.py:FUNCTION$"):
        registry["mine.py"]
    with pytest.raises(UsageError, match=r"unknown schedule 'gpip' .did you mean 'gpipe'..; there are 1f1b, gpipe"):
        registry["gpip"]


def test_a_name_that_is_added_again_replaces_the_entry():
    registry = Registry("schedule")
    for entry in (1, 2):
        registry.add("mine", entry)
    assert dict(registry) == {"mine": 2}


def test_a_name_that_is_not_there_loads_further_entries(monkeypatch):
    loads = []

    def load_more(registry):
        loads.append(registry.kind)
        registry.add("two", 2)
        return len(loads) == 1

    monkeypatch.setattr(hooks, "load_more", load_more)
    registry = Registry("schedule")
    registry.add("one", 1)
    assert "one" in registry
    assert loads == []
    assert registry["TWO"] == 2
    assert loads == ["schedule"]
    assert "three" not in registry
    assert loads == ["schedule"] * 2


def test_importing_a_package_imports_its_files_and_so_registers_their_entries(tmp_path, monkeypatch):
    package = tmp_path / "shelf"
    package.mkdir()
    (package / "table.py").write_text("from minidist.core.base.registry import Registry\nBOOKS = Registry('book')\n")
    (package / "one.py").write_text("from shelf.table import BOOKS\nBOOKS.add('one', 1)\n")
    (package / "__init__.py").write_text(
        "from minidist.base.extras import import_modules\nimport_modules(__name__, __path__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import shelf.table

    try:
        assert shelf.table.BOOKS == {"one": 1}
        (package / "two.py").write_text("from shelf.table import BOOKS\nBOOKS.add('two', 2)\n")
        import_modules("shelf", shelf.__path__)
        assert shelf.table.BOOKS == {"one": 1, "two": 2}
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "shelf"]:
            del sys.modules[name]
