"""Misuse is never silent: each row of the table is one sentence with the user's line, or equals one device."""

from pathlib import Path

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.comm.program_lines import line_of_error
from minidist.core.base.errors import MinidistError
from tests.misuse import rows as module
from tests.misuse.rows import TABLE


def run(row, comm):
    """What the row says, on this rank: an error passes on, and pairs are compared."""
    result = row.function(comm)
    assert (row.pattern is None) is (result is not None), "an `equal` row yields, a `refused` one raises"
    if row.pattern is not None:
        return
    for mine, expected in result:
        assert mine.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(mine[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=str(name))


def check_sentence(row, caught):
    """One sentence with a remedy, and the line in the row's own function that led to it."""
    assert "\n" not in str(caught.value)
    if "misuse/rows.py:" in str(caught.value):
        return  # a report of messages names the lines of both ranks itself
    line = line_of_error(caught.value)
    assert line is not None
    assert line.filename == module.__file__
    first = row.function.__code__.co_firstlineno
    inside = first <= line.line <= max(number for *_, number in row.function.__code__.co_lines() if number)
    assert inside or any(
        helper.__code__.co_firstlineno <= line.line <= helper.__code__.co_firstlineno + 20
        for helper in (
            module.loss_of,
            module.one_step,
            module.unlike,
            module.pipeline,
            module.Returns.forward,
            module.Ends.forward,
        )
    ), f"the error names line {line.line} of {Path(line.filename).name}"


def test_the_table_has_at_least_sixty_rows_with_names_of_their_own():
    assert len(TABLE) >= 60
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_misuse_in_the_simulated_world(row):
    if row.pattern is None:
        SimWorld(row.ranks).run(lambda comm: run(row, comm))
        return
    with pytest.raises(MinidistError, match=row.pattern) as caught:
        SimWorld(row.ranks).run(lambda comm: run(row, comm))
    check_sentence(row, caught)


@pytest.mark.mpi(2, timeout=60)
def test_misuse_on_two_ranks_of_mpi(comm):
    """All rows in one launch: an error on all ranks leaves nothing on its way."""
    chosen = [row for row in TABLE if row.mpi and row.ranks == comm.size]
    assert chosen
    for row in chosen:
        part = comm.dup()
        if row.pattern is None:
            run(row, part)
            continue
        with pytest.raises(MinidistError, match=row.pattern) as caught:
            run(row, part)
        check_sentence(row, caught)
