"""Runs one test over many cases, where pytest would make an item of each: an item costs more than most cases do.

    @each("text, value", [("1", 1), ("2", 2)])
    def test_a_number_is_read(text, value): ...

is one item, whose message names the cases that fail. Each case has an empty `tmp_path`, a `monkeypatch` that ends with
it, and a `capsys` that has read nothing; what other fixtures give, all cases share. A decorator above another makes
every pair, as pytest's do. With `sampled=7` in one of them `make test` runs the first case and one in 7 of the other
pairs, and `make exhaustive` all of them.

Proved by: tests/test_cases.py
"""

import functools
import inspect
import re
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType
from zlib import crc32

import pytest

from minidist.job.config.train_config import TrainConfig

MOST = 5  # failures that are reported; a bug that fails every case ends the test early
TECHNIQUES = Path(__file__).parents[1] / "docs" / "techniques.md"


def absent_folders():
    """Return the folders of minidist/techniques that their page lists and that somebody has deleted."""
    listed = re.findall(r"\]\(\.\./(minidist/techniques/\w+)\)", TECHNIQUES.read_text(encoding="utf-8"))
    return [folder for folder in listed if not (TECHNIQUES.parents[1] / folder).exists()]


def has_settings(settings):
    """Return whether a job has all these settings; without a folder of a technique some are not there."""
    return set(settings) <= set(TrainConfig.model_fields) or not absent_folders()


def each(names, values, *, ids=None, sampled=None):
    """Return a decorator for a test that runs it with each of the values; the arguments are those of parametrize.

    Cases that are skipped count as passed, but one at least must run. Under MPI the first failure ends the test: the
    other ranks may wait for this one.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    assert values, "a test without a case passes whatever is wrong"

    def decorate(test):
        below, those, one_in = getattr(test, "each", (test, [("", {})], None))
        taken = inspect.signature(below)
        assert set(names) <= set(taken.parameters), f"{below.__name__} does not take {', '.join(names)}"
        own = [(dict(zip(names, value if len(names) > 1 else (value,), strict=True)), value) for value in values]
        own = [(title(given, value, number, ids), given) for number, (given, value) in enumerate(own)]
        cases = [(name + ", " * bool(more) + more, given | rest) for name, given in own for more, rest in those]
        left = [p for p in taken.parameters.values() if p.name not in cases[0][1]]
        one_in_all = sampled or one_in

        def run(**fixtures):
            whole = one_in_all is None or fixtures.pop("cases") == "all"
            try_each(below, cases if whole else sample(cases, one_in_all), fixtures)

        run = functools.wraps(test)(run)
        del run.__wrapped__  # or pytest would look for the arguments there
        run.each = below, cases, one_in_all
        if one_in_all is not None:
            left.append(inspect.Parameter("cases", inspect.Parameter.KEYWORD_ONLY))
        if one_in_all is not None and one_in is None:  # else it is marked already
            both = ["sample", pytest.param("all", marks=pytest.mark.exhaustive)]
            run = pytest.mark.parametrize("cases", both)(run)
        run.__signature__ = taken.replace(parameters=left)
        return run

    return decorate


def try_each(test, cases, fixtures):
    """Run a test for each (name, arguments), and raise one error for all that fail, with the first one's traceback."""
    failed, skipped, number = [], [], 0
    for number, (name, given) in enumerate(cases, 1):
        try:
            with ExitStack() as stack:
                test(**fresh(fixtures, number, stack), **given)
        except pytest.skip.Exception as error:
            skipped.append(error)
        except (Exception, pytest.fail.Exception) as error:
            failed.append((name, error))
            if len(failed) == MOST or "comm" in fixtures:
                break
    if failed:
        lines = [f"{name}: {type(error).__name__}: {error}" for name, error in failed]
        left = f"; {len(cases) - number} were not tried" if number < len(cases) else ""
        raise AssertionError(f"{len(failed)} of {number} cases fail{left}\n" + "\n".join(lines)) from failed[0][1]
    if len(skipped) == number:
        raise skipped[0]


def sample(cases, one_in):
    """Return the first of the (name, case) and one in n of the others, the same everywhere: a checksum draws them."""
    names = sorted((name for name, _ in cases[1:]), key=lambda name: crc32(name.encode()))
    drawn = set(names[: len(names) // one_in])
    return cases[:1] + [case for case in cases[1:] if case[0] in drawn]


def fresh(fixtures, number, stack):
    """Return the fixtures of one case."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "monkeypatch" in own:
        own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
    for name in ("capsys", "capfd"):
        if name in own:
            own[name].readouterr()
    return own


def title(given, value, number, ids):
    """Return what the message calls a case: the same in every process, without the address of an object."""
    if ids is not None:
        return str(ids(value) if callable(ids) else ids[number])
    called = {name: what.__name__ if isinstance(what, type | FunctionType) else what for name, what in given.items()}
    return re.sub(r" at 0x[0-9a-f]+", "", ", ".join(f"{name} = {what!s}" for name, what in called.items()))
