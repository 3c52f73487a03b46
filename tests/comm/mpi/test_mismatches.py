"""MPI ranks that pass unlike arguments: each row of the table is a sentence on both ranks, at once."""

import re

from tests.comm.mismatches import TABLE


def test_mpi_ranks_that_disagree(run):
    """All rows in which both ranks raise, in one launch: each on a separate communicator."""
    rows = [row for row in TABLE if row.both]
    program = """
from minidist.core.base.errors import CommunicationError
from tests.comm.mismatches import TABLE
def main(comm):
    for row in TABLE:
        if row.both:
            part = comm.dup()
            try:
                row.function(part)
            except CommunicationError as error:
                print(f"{row.name}@{comm.rank}:{error}")
                assert comm.world.waiting is None  # the watchdog would end a program that caught it and computes
            else:
                print(f"{row.name}@{comm.rank}:no error")
    comm.world.base.Barrier()
    time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the abort
    comm.world.MPI.COMM_WORLD.Abort(0)  # what was sent and refused is on its way
"""
    _, output = run.ended(program, 2, "--timeout", "2")
    said = dict(re.findall(r"^(\w+@\d):(.*)$", output, flags=re.M))
    for row in rows:
        for rank in range(2):
            sentence = said.get(f"{row.name}@{rank}", "nothing")
            assert re.search(row.words.replace("world", r"world\S*"), sentence), (row.name, rank, sentence, output)
            assert "mismatches.py:" in sentence
