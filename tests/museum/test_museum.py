"""Every planted bug turns the checks that are meant for it red; without it they are green."""

import pytest

from minidist.base.errors import MinidistError
from tests.museum.bugs import BUGS, WRONG_PROGRAMS

RED = (AssertionError, MinidistError, KeyError, pytest.fail.Exception)
CHECKS = [pytest.param(bug, name, id=f"{bug.number}-{name}") for bug in BUGS for name in bug.checks]


@pytest.mark.parametrize(("bug", "name"), CHECKS)
def test_a_planted_bug_is_caught(bug, name, monkeypatch):
    bug.checks[name]()
    bug.plant(monkeypatch)
    with pytest.raises(RED):
        bug.checks[name]()


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
def test_a_wrong_program_is_caught(name):
    with pytest.raises(AssertionError):
        WRONG_PROGRAMS[name]()
