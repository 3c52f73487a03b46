"""The modules that a rank imports as mpi4py: one set for each rank, whose COMM_WORLD is that of the rank.

    import mpi4py               mpi4py.rc, get_include, get_config
    from mpi4py import MPI      the constants, classes and functions of this package
    from mpi4py.util import dtlib, pkl5

Proved by: tests/mpi_ranks/test_program.py
"""

import platform
from functools import cache
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from minidist.comm.communicator import CheckedComm as Members
from minidist.debug.mpi_ranks import buffers, communicator, constants, datatype, objects, op, request, topology
from minidist.debug.mpi_ranks.constants import MORE_RANKS, failed, refusing, unknown, unsupported
from minidist.debug.mpi_ranks.group import Group
from minidist.debug.mpi_ranks.group import Members as GroupMembers
from minidist.debug.mpi_ranks.world import MPIWorld

VERSION = (4, 0)  # of the standard
CLASSES = (
    *(communicator.Comm, communicator.Intracomm, communicator.Intercomm),
    *(topology.Topocomm, topology.Cartcomm, topology.Graphcomm, topology.Distgraphcomm),
    *(request.Status, request.Request, request.Prequest, request.Grequest, request.Message),
    *(datatype.Datatype, op.Op, Group, objects.Info, objects.Errhandler, objects.Pickle, constants.Exception),
    *(objects.Win, objects.File, objects.Session),
)
THREADS = {f"THREAD_{name}": k for k, name in enumerate(("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"))}
NO_FUNCTIONS = ("Open_port", "Publish_name", "Lookup_name", "Register_datarep")
_NUMBERS = {
    "VERSION": VERSION[0],
    "SUBVERSION": VERSION[1],
    "MAX_PROCESSOR_NAME": 256,
    "MAX_ERROR_STRING": 512,
    "MAX_OBJECT_NAME": 128,
    "MAX_LIBRARY_VERSION_STRING": 256,
    "MAX_PORT_NAME": 256,
    "MAX_INFO_KEY": 255,
    "MAX_INFO_VAL": 1024,
    "MAX_DATAREP_STRING": 128,
    "ORDER_F": datatype.ORDER_FORTRAN,
    "COMM_TYPE_HW_UNGUIDED": 3,
    "COMM_TYPE_RESOURCE_GUIDED": 4,
    "LOCK_EXCLUSIVE": 1,
    "LOCK_SHARED": 2,
    "MODE_RDONLY": 2,
    "MODE_WRONLY": 4,
    "MODE_RDWR": 8,
    "MODE_CREATE": 1,
}


@cache
def _shared() -> dict[str, Any]:
    """Return what the modules of all ranks have in common."""
    names: dict[str, Any] = {**_NUMBERS, **THREADS, **constants.ERRORS, **constants.KEYVALS}
    names |= {**datatype.Datatype.names, **op.OPS, **buffers.CONSTANTS}
    names |= {kind.__name__: kind for kind in CLASSES}
    for module in (constants, communicator, datatype, topology):
        names |= {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}
    names.update(Get_error_class=constants.Get_error_class, Get_error_string=constants.Get_error_string)
    for name, error in (("ERRORS_RETURN", "MPI_ERRORS_RETURN"), ("ERRORS_ARE_FATAL", "MPI_ERRORS_ARE_FATAL")):
        names[name] = objects.Errhandler.of(error, name)
    names["ERRORS_ABORT"] = objects.Errhandler.of("MPI_ERRORS_ABORT", "ERRORS_ABORT")
    for kind in (
        *(request.Request, request.Message, datatype.Datatype, op.Op, Group),
        *(objects.Info, objects.Errhandler, objects.Win, objects.File, objects.Session, communicator.Comm),
    ):
        null = f"{kind.__name__.upper()}_NULL"
        names[null] = kind.of(None, null)
    for absent in ("BFLOAT16_T", "COMPLEX4", "INTEGER16", "LOGICAL2", "LOGICAL16"):
        names[absent] = datatype.Datatype.of(None, "DATATYPE_NULL")
    names["INFO_ENV"] = objects.Info.of({}, "INFO_ENV")
    names.update(buffer=buffers.Allocated, memory=buffers.Allocated)
    names.update(pickle=objects.pickle, Compute_dims=topology.compute_dims)
    names["MESSAGE_NO_PROC"] = request.Message.of(request.NO_MESSAGE, "MESSAGE_NO_PROC")
    names["Exception"].__module__ = "mpi4py.MPI"
    return names


def _functions(world: MPIWorld, rank: int, settings: "Settings") -> dict[str, Any]:
    """Return the functions of MPI that belong to a rank."""
    state = {"initialized": False, "finalized": False, "level": THREADS["THREAD_MULTIPLE"]}

    def Attach_buffer(buf: Any) -> None:
        """Give buffered sends room."""
        world.buffered[rank] = buffers.BUFFER_AUTOMATIC if buf is None else buf

    def Detach_buffer() -> Any:
        """Return the buffer of buffered sends; messages in it have left it."""
        return world.buffered.pop(rank, None)

    def Finalize() -> None:
        """Say that the program uses MPI no more."""
        state["finalized"] = True

    def init(required: int = state["level"]) -> Any:
        """Begin to use MPI; return the level of threads."""
        state["initialized"] = True
        return state["level"]

    return {
        **{name: refusing(f"MPI.{name}", MORE_RANKS) for name in NO_FUNCTIONS},
        "Attach_buffer": Attach_buffer,
        "Detach_buffer": Detach_buffer,
        "Flush_buffer": lambda: None,
        "Iflush_buffer": lambda: request.Request.of(request.Pending(None)),
        "Init": init,
        "Init_thread": init,
        "Finalize": Finalize,
        "Is_initialized": lambda: bool(settings.initialize or state["initialized"]),
        "Is_finalized": lambda: state["finalized"],
        "Query_thread": lambda: state["level"],
        "Is_thread_main": lambda: True,
        "Get_version": lambda: VERSION,
        "Get_abi_version": lambda: (-1, -1),
        "Get_library_version": lambda: "minidist, simulated ranks",
        "get_vendor": lambda: ("minidist", (1, 0, 0)),
        "Get_processor_name": platform.node,
        "Wtime": lambda: world.seconds(rank),
        "Wtick": lambda: 1e-9,
        "Pcontrol": lambda level: None,
        "Get_address": buffers.address_of,
        "Aint_add": lambda base, disp: base + disp,
        "Aint_diff": lambda addr1, addr2: addr1 - addr2,
        "Alloc_mem": lambda size, info=None: np.zeros(size, np.uint8).view(buffers.Allocated),
        "Free_mem": lambda mem: None,
        "_comm_lock_table": lambda comm: comm.context.locks,
        "_typecode": lambda kind: None if kind.held is None else kind.layout.element.char,
        "_sizeof": lambda value: buffers.memory(value).size,
        "_addressof": buffers.address_of,
    }


def modules_of(world: MPIWorld, comm: Members) -> dict[str, ModuleType]:
    """Return the modules of a rank, by name. comm: of all ranks, seen from this one."""
    rank, intracomm = comm.rank, communicator.Intracomm
    settings = Settings()
    own = Members(world, "self", [rank], 0, f"{rank}")
    mpi = _module("mpi4py.MPI", {**_shared(), **_functions(world, rank, settings)})
    vars(mpi)["__getattr__"] = unknown_of_mpi
    for name, members in (("COMM_WORLD", comm), ("COMM_SELF", own)):
        setattr(mpi, name, intracomm.of(communicator.Context(members, f"MPI_{name}"), name))
    vars(mpi)["GROUP_EMPTY"] = Group.of(GroupMembers([], rank), "GROUP_EMPTY")

    dtlib = _module("mpi4py.util.dtlib", {"from_numpy_dtype": from_numpy_dtype, "to_numpy_dtype": to_numpy_dtype})
    kinds = communicator.Comm, intracomm, request.Request, request.Message
    pkl5 = _module("mpi4py.util.pkl5", {kind.__name__: kind for kind in kinds} | {"pickle": objects.pickle})
    util = _module("mpi4py.util", {"dtlib": dtlib, "pkl5": pkl5, "__path__": []})
    functions = {"profile": lambda *_, **__: None, "get_include": lambda: "", "get_config": dict}
    values = {"MPI": mpi, "util": util, "rc": settings, "__version__": "4.1.0", "__path__": []}
    package = _module("mpi4py", functions | values)
    futures = _module("mpi4py.futures", {"__getattr__": no_futures})
    return {module.__name__: module for module in (package, mpi, util, dtlib, pkl5, futures)}


class Settings:
    """mpi4py.rc: what a program may set before it imports MPI. Nothing of it changes a simulated run."""

    defaults = MappingProxyType(
        {
            "initialize": True,
            "threads": True,
            "thread_level": "multiple",
            "finalize": None,
            "fast_reduce": True,
            "recv_mprobe": True,
            "irecv_bufsz": communicator.IRECV_BYTES,
            "errors": "exception",
        }
    )

    def __init__(self) -> None:
        vars(self).update(self.defaults)

    def __call__(self, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.defaults:
            raise TypeError(f"mpi4py.rc has no setting {name!r}; one of {', '.join(self.defaults)}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"mpi4py.rc has no setting {name!r}")


def no_futures(name: str) -> Any:
    """Refuse what mpi4py.futures has, which starts processes."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise unsupported(f"mpi4py.futures.{name}", "send the tasks as messages, or run it under mpiexec")


def unknown_of_mpi(name: str) -> Any:
    """Refuse a name that MPI has, and this package has not."""
    raise unknown(name, "MPI")


def _module(name: str, values: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "mpi4py on the simulated ranks of minidist.")
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(values)
    return module


def from_numpy_dtype(dtype: Any) -> datatype.Datatype:
    """Return the datatype of one of NumPy's dtypes, which may have fields or be an array."""
    dtype = np.dtype(dtype)
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return from_numpy_dtype(base).Create_contiguous(int(np.prod(shape)))
    if not dtype.names:
        return datatype.datatype_of(dtype.str if dtype.kind != "b" else "?")
    fields = [dtype.fields[name] for name in dtype.names]
    parts = [from_numpy_dtype(found[0]) for found in fields]
    struct = datatype.Datatype.Create_struct([1] * len(parts), [found[1] for found in fields], parts)
    return struct.Create_resized(0, dtype.itemsize)


def to_numpy_dtype(kind: datatype.Datatype) -> np.dtype[Any]:
    """Return NumPy's dtype of a datatype without gaps."""
    layout = kind.layout
    if not layout.contiguous:
        raise failed("ERR_TYPE", f"{kind.Get_name() or 'the datatype'} has gaps, which no dtype here has")
    return layout.element if len(layout.offsets) == 1 else np.dtype((layout.element, (len(layout.offsets),)))
