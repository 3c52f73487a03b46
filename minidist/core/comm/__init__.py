"""Communication: one interface for simulated and for real ranks. Nothing here depends on tensors.

`Comm` is the interface. `Sim` runs ranks as fibers on a virtual clock. minidist/comm adds `SimWorld`, which also checks
and records messages, `MPIWorld`, which runs ranks as processes under `mpiexec`, and `launch`, which chooses.

communicator.py     send and receive: the interface of both worlds; a group of ranks and its collective calls
mesh.py             ranks in a grid of axes
sim/                the simulated world: ranks in one process, virtual time
"""

from minidist.core.comm.communicator import ANY as ANY
from minidist.core.comm.communicator import CollectiveCall as CollectiveCall
from minidist.core.comm.communicator import Comm as Comm
from minidist.core.comm.communicator import PointToPoint as PointToPoint
from minidist.core.comm.communicator import Request as Request
from minidist.core.comm.communicator import Work as Work
from minidist.core.comm.mesh import Mesh as Mesh
from minidist.core.comm.mesh import check_communicator as check_communicator
from minidist.core.comm.mesh import init_device_mesh as init_device_mesh
from minidist.core.comm.sim.clock import LinkModel as LinkModel
