"""What test_pyodide.py runs in Pyodide: the scenarios of fibers, and simulated ranks.

No package index that the tests may use has NumPy for Pyodide. So the modules that import it get a stand-in whose
classes can do nothing, and messages carry `Box`, an object with the attributes that a communicator reads of an array.
Scheduler, matching, clock and reports of the simulated world are the real ones.
"""

import re
import sys
import time
import types
from importlib import import_module


class _Everything(type):
    """The class of names that are never used: every attribute of one is such a name again."""

    def __getattr__(cls, name):
        return cls


class _Nothing(metaclass=_Everything):
    __slots__ = ()

    def __init__(self, *arguments, **keywords):
        pass

    def __class_getitem__(cls, item):
        return cls


class _StandIn(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {"__slots__": ()})


def stand_in_for_numpy():
    """Let `import numpy` and what needs it succeed."""
    names = "numpy numpy.lib numpy.lib.format numpy.lib.mixins numpy.lib.stride_tricks numpy.exceptions numpy.typing"
    for name in (*names.split(), "ml_dtypes"):
        sys.modules[name] = _StandIn(name)


class _Dtype:
    hasobject, itemsize, name = False, 8, "float64"

    def __str__(self):
        return self.name


class _Flags:
    c_contiguous = writeable = True


class Box:
    """One number of eight bytes, where a program with NumPy has an array."""

    flags, dtype = _Flags(), _Dtype()
    nbytes = itemsize = 8
    size = ndim = 1
    shape = (1,)

    def __init__(self, value=0):
        self.value = value

    def __getitem__(self, index):
        return self

    def __setitem__(self, index, other):
        self.value = other.value

    def reshape(self, *shape):
        return self

    def copy(self):
        return Box(self.value)


def ring(comm):
    """Return the sum of all ranks' numbers, which travel once around."""
    total = value = comm.rank
    for _ in range(comm.size - 1):
        incoming = Box()
        request = comm.irecv(incoming, (comm.rank - 1) % comm.size)
        comm.send(Box(value), (comm.rank + 1) % comm.size)
        comm.wait(request)
        value = incoming.value
        total += value
    return total


def stuck(comm):
    """Wait for the next rank, as all do."""
    comm.recv(Box(), (comm.rank + 1) % comm.size)


def in_the_background(comm):
    """Run the ring as an asynchronous work, in a separate stream."""
    part = comm.dup()
    return comm.run_async(lambda: ring(part)).wait()


def killed(comm):
    """Let rank 2 die in its first message; rank 1 is told, the others return."""
    errors = import_module("minidist.core.base.errors")
    if comm.rank == 1:
        try:
            comm.recv(Box(), 2)
        except errors.RankDeadError as error:
            return error.rank
    elif comm.rank == 2:
        comm.send(Box(), 1)
    return comm.rank


def simulated_ranks():
    """Run programs of simulated ranks; return what is compared with CPython's results."""
    comm, errors = import_module("minidist.comm"), import_module("minidist.core.base.errors")
    links = comm.LinkModel(alpha=1e-6, beta=1e-10, overhead=0.25e-6)
    found = {}
    for ranks in (1, 4, 16):
        world = comm.SimWorld(ranks, links=links, checks=False)
        found[f"ring of {ranks}"] = [world.run(ring), world.end_time, [len(trace.sent()) for trace in world.traces]]
        found[f"works of {ranks}"] = [world.run(in_the_background), world.end_time]
    try:
        comm.SimWorld(4, checks=False).run(stuck)
    except errors.DeadlockError as error:
        found["deadlock"] = re.sub(r"at \S*pyodide_programs\.py", "at program", str(error))
    world = comm.SimWorld(3, checks=False, on_failure="isolate")
    world.kill(2, after_messages=0)
    found["killed"] = world.run(killed)
    return found


def main():
    """Print a line for each scenario, then the results of the simulated ranks."""
    scenarios = import_module("tests.base.fiber_scenarios").SCENARIOS
    for scenario in scenarios:
        scenario()
        print("passed", scenario.__name__)
    stand_in_for_numpy()
    start = time.perf_counter()
    print("results", simulated_ranks())
    print(f"seconds {time.perf_counter() - start:.2f}")


if __name__ == "__main__":
    main()
