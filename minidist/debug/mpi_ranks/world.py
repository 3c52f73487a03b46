"""The simulated world of a program of mpi4py: a SimWorld whose ranks have what processes have, and MPI's clock.

Each rank is a greenlet, as always. When one lets others run, its modules, environment variables and output are put away
(`debug/rank_process.py`), and the seconds are counted in which it has computed.

Proved by: tests/mpi_ranks/test_program.py, tests/mpi_ranks/test_messages.py
"""

import io
import sys
from time import perf_counter
from typing import Any

from minidist.comm.sim.sim_world import SimWorld
from minidist.core.comm.communicator import Request, Work
from minidist.debug.mpi_ranks.matching import MPIMatching
from minidist.debug.rank_process import RankProcess


class MPIWorld(SimWorld):
    """A world for programs of mpi4py. left: what the program has sent and never received, or begun and never ended."""

    matching: MPIMatching

    def __init__(self, ranks: int, **options: Any) -> None:
        super().__init__(ranks, **options)
        self.processes: dict[int, RankProcess] = {}
        self.computed = [0.0] * ranks
        self.entered = [0.0] * ranks
        self.buffered: dict[int, Any] = {}  # by rank: the buffer that it has attached for Bsend
        self.names: dict[str, str] = {}  # that the program has given to communicators
        self.lost: list[str] = []
        self.unwaited: list[str] = []

    def enter(self, rank: int) -> None:
        """Make the process this rank's."""
        self.processes[rank].enter()
        if self.looking_ahead:  # what the program prints from here on is no result
            sys.stdout = io.StringIO()
        self.entered[rank] = perf_counter()

    def leave(self, rank: int) -> None:
        """Put away what this rank has as if it were a process."""
        self.computed[rank] += perf_counter() - self.entered[rank]
        self.processes[rank].leave()

    def seconds(self, rank: int) -> float:
        """Return Wtime: the virtual seconds of communication, and the real ones in which this rank has computed."""
        return self.state.running.time + self.computed[rank] + perf_counter() - self.entered[rank]

    def _new_matching(self) -> MPIMatching:
        return MPIMatching(self)

    def _block(self, on: Request | Work) -> None:
        stream = self.state.running
        if not stream.is_main:
            super()._block(on)
            return
        self.leave(stream.rank)
        try:
            super()._block(on)
        finally:
            self.enter(stream.rank)

    def _finish(self) -> None:
        """Note what was left open, which MPI would not say; calls that differ are an error, as always."""
        state = self.state
        for context, source, peer, tag in list(state.sends):
            if not context.endswith("/collectives"):
                for send in state.sends.pop((context, source, peer, tag)):
                    state.unwaited.pop(id(send), None)
                    self.lost.append(f"rank {source}: its {send.describe()} was never received")
        for rank, item in state.items_unwaited():
            self.unwaited.append(f"rank {rank}: its {item.describe()} was never waited for")
        state.unwaited.clear()
        super()._finish()
