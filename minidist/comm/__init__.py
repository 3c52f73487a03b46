"""Communication: one interface, three worlds. Nothing here knows what a tensor is.

`Comm` is the interface; `SimWorld` runs ranks as greenlets on a virtual clock, `MPIWorld` runs them as processes under
`mpiexec`, and `launch` picks the one that fits.
"""

from minidist.comm.communicator import ANY, Comm, Request, Work
from minidist.comm.launch import launch
from minidist.comm.mesh import Mesh, init_device_mesh
from minidist.comm.mpi.world import MPIWorld
from minidist.comm.sim.choosers import Chooser, earliest, explore, replay, seeded
from minidist.comm.sim.clock import LinkModel
from minidist.comm.sim.world import SimWorld

__all__ = [
    "ANY",
    "Chooser",
    "Comm",
    "LinkModel",
    "MPIWorld",
    "Mesh",
    "Request",
    "SimWorld",
    "Work",
    "earliest",
    "explore",
    "init_device_mesh",
    "launch",
    "replay",
    "seeded",
]
