"""Communication: one interface, two worlds. Nothing here knows what a tensor is.

`Comm` is the interface; `SimWorld` runs ranks as fibers on a virtual clock, `MPIWorld` runs them as processes under
`mpiexec`, and `launch` picks the one that fits.

communicator.py     a group of ranks and its collective calls
point_to_point.py   send and receive: the interface of both worlds
mesh.py             ranks in a grid of axes
launching.py        one way to start a program in any world
sim/                the simulated world: ranks in one process, virtual time
mpi/                the MPI world: every rank is a process
launched.py         how many processes the launcher started
launcher.py         finds and calls `mpiexec`
has_run.py          a rank that returned a generator has run nothing
header.py           what both sides of a message must agree on
claims.py           what the members of a communicator must say alike when they make it
call_log.py         which collective calls a rank has made
unlike_calls.py     the sentence about the first call in which ranks differ
buffers.py          which memory a message uses
waiting.py          which rank waits for which
call_site.py        the user's line on which an operation started
program_lines.py    the user's line of an error, and of another thread
"""

from typing import TYPE_CHECKING

from minidist.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.comm.communicator import CollectiveCall, Comm
    from minidist.comm.launching import launch
    from minidist.comm.mesh import Mesh, check_communicator, init_device_mesh
    from minidist.comm.mpi.world import MPIWorld
    from minidist.comm.point_to_point import ANY, PointToPoint, Request, Work
    from minidist.comm.sim.choosers import Chooser, earliest, explore, replay, seeded
    from minidist.comm.sim.clock import LinkModel
    from minidist.comm.sim.sim_world import SimWorld

__all__ = [
    "ANY",
    "Chooser",
    "CollectiveCall",
    "Comm",
    "LinkModel",
    "MPIWorld",
    "Mesh",
    "PointToPoint",
    "Request",
    "SimWorld",
    "Work",
    "check_communicator",
    "earliest",
    "explore",
    "init_device_mesh",
    "launch",
    "replay",
    "seeded",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
