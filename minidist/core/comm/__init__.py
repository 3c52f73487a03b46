"""Communication: one interface, two worlds. Nothing here knows what a tensor is.

`Comm` is the interface; `SimWorld` runs ranks as fibers on a virtual clock, `MPIWorld` runs them as processes under
`mpiexec`, and `launch` picks the one that fits.

communicator.py     a group of ranks and its collective calls
point_to_point.py   send and receive: the interface of both worlds
mesh.py             ranks in a grid of axes
sim/                the simulated world: ranks in one process, virtual time
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.comm.communicator import CollectiveCall, Comm
    from minidist.core.comm.mesh import Mesh, check_communicator, init_device_mesh
    from minidist.core.comm.point_to_point import ANY, PointToPoint, Request, Work
    from minidist.core.comm.sim.clock import LinkModel

__all__ = [
    "ANY",
    "CollectiveCall",
    "Comm",
    "LinkModel",
    "Mesh",
    "PointToPoint",
    "Request",
    "Work",
    "check_communicator",
    "init_device_mesh",
]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
