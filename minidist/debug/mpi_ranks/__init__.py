"""Programs of mpi4py on simulated ranks: each rank is a greenlet of this process, with the modules of a process.

program.py         runs a program on every rank, once or with other choices of its wildcard receives
module.py          the modules mpi4py and mpi4py.MPI of a rank
world.py           the simulated world, and MPI's clock
matching.py        which send is matched with which receive
communicator.py    messages between two ranks, and how communicators are made
collective.py      collectives of buffers and of objects
topology.py        grids, graphs, and collectives among neighbors
request.py         requests of nonblocking operations, statuses, matched messages
buffers.py         what may be a message, and the array that is sent for it
datatype.py        datatypes, predefined and derived
op.py              reduction operations
group.py           groups of ranks
objects.py         hints, error handlers, pickling, and what is refused
handle.py          what all objects of MPI have in common
constants.py       MPI's constants and errors

A method without a docstring does what mpi4py's documentation says of the method with the same name.
"""
