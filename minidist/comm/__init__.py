"""The MPI world, launching, and what watches messages: headers, buffers in flight, calls that differ.

launching.py        one way to start a program in any world
sim/                the simulated world: ranks in one process, virtual time
mpi/                the MPI world: every rank is a process
launched.py         how many processes the launcher started
launcher.py         finds and calls `mpiexec`
has_run.py          refuses a program that returned a generator and so has not run
header.py           what both sides of a message must agree on
differences.py      how two sides of a message differ
call_log.py         which collective calls a rank has made
unlike_calls.py     the sentence about the first call in which ranks differ
communicator.py     the communicator that a program is given
errors.py           one class per way in which messages go wrong
message_checks.py   what can be wrong with a message on one rank alone
message_refusals.py the check of a message that is not plain, and its errors
buffers.py          which memory a message uses
call_site.py        the user's line on which an operation started, or at which another thread is
program_lines.py    the user's line of an error
remedies.py         what to write here instead of a name of PyTorch's or mpi4py's
tracebacks.py       what a person reads of an exception that is not ours
tags.py             the tags of messages, and a message in words
waiting.py          which rank waits for which
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.comm.launching import launch
    from minidist.comm.mpi.world import MPIWorld
    from minidist.comm.sim.choosers import Chooser, earliest, explore, replay, seeded
    from minidist.comm.sim.sim_world import SimWorld

__all__ = ["Chooser", "MPIWorld", "SimWorld", "earliest", "explore", "launch", "replay", "seeded"]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
