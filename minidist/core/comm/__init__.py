"""Communication: one interface, two worlds. Nothing here knows what a tensor is.

`Comm` is the interface; `SimWorld` runs ranks as fibers on a virtual clock, `MPIWorld` runs them as processes under
`mpiexec`, and `launch` picks the one that fits.

communicator.py     a group of ranks and its collective calls
point_to_point.py   send and receive: the interface of both worlds
mesh.py             ranks in a grid of axes
sim/                the simulated world: ranks in one process, virtual time
"""

from minidist.core.comm.communicator import CollectiveCall as CollectiveCall
from minidist.core.comm.communicator import Comm as Comm
from minidist.core.comm.mesh import Mesh as Mesh
from minidist.core.comm.mesh import check_communicator as check_communicator
from minidist.core.comm.mesh import init_device_mesh as init_device_mesh
from minidist.core.comm.point_to_point import ANY as ANY
from minidist.core.comm.point_to_point import PointToPoint as PointToPoint
from minidist.core.comm.point_to_point import Request as Request
from minidist.core.comm.point_to_point import Work as Work
from minidist.core.comm.sim.clock import LinkModel as LinkModel
