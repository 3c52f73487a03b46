"""Communication: one interface for simulated and for real ranks. Nothing here depends on tensors.

`Comm` is the interface. `Sim` (sim/world.py) runs ranks as fibers in virtual time. minidist/comm adds `SimWorld`, which
also checks and records, `MPIWorld`, which runs ranks as processes under `mpiexec`, and `launch`, which chooses.

communicator.py     send and receive: the interface of both worlds; a group of ranks and its collective calls
mesh.py             ranks in a grid of axes
sim/                the simulated world: ranks in one process, virtual time
"""

from minidist.core.comm.communicator import ANY, CollectiveCall, Comm, PointToPoint, Request, Work
from minidist.core.comm.mesh import Mesh, check_communicator, init_device_mesh
from minidist.core.comm.sim.matching import AlphaBeta
