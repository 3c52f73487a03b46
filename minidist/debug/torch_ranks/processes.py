"""Programs that start their ranks themselves: mp.spawn, and Process of multiprocessing and of torch.multiprocessing.

The program that starts processes is no rank: it runs once. A process that it starts is kept until the program waits
for one; then a world of as many ranks runs. Each of them executes the program's file anew as `__mp_main__`, as a
process does, and then its function:

    main program    mp.spawn(work, nprocs=2) ──▶ waits ································▶ goes on
    rank 0                                       file as __mp_main__ ──▶ work(0) ──▶ ends
    rank 1                                       file as __mp_main__ ──▶ work(1) ──▶ ends

Arguments are pickled, as between processes; tensors keep their memory, which torch shares between processes.

Proved by: tests/torch_ranks/test_processes.py
"""

import copy
import io
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from multiprocessing import context as contexts
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as torch_multiprocessing
from torch import nn

from minidist.comm.call_site import call_site
from minidist.core.base.errors import UsageError
from minidist.debug.torch_ranks.isolation import Changes, replaced
from minidist.debug.torch_ranks.rank_thread import current_rank, in_rank
from minidist.debug.torch_ranks.store import Shared
from minidist.debug.user_program import UserProgram

STARTERS = ("torch.distributed.run", "torch.distributed.launch")
QUEUES = ("Queue", "SimpleQueue", "JoinableQueue")
OF_PYTHON = ("multiprocessing", "concurrent", "torch.utils.data")  # their processes compute and do not communicate


class BeforeFork(BaseException):
    """Raised where the program's file starts a process, while a rank executes it: a forked process is from here."""


class RankPopen:
    """Takes the place of what controls a real process. It has ended as soon as anybody waits for it."""

    method = "rank"

    def __init__(self, processes: "Processes", process: Any, forked: bool) -> None:
        self.processes = processes
        self.returncode: int | None = None
        self.pid = os.getpid()
        self.sentinel = os.open(os.devnull, os.O_RDONLY)
        processes.start(self, process, forked)

    def poll(self, flag: int = 0) -> int | None:
        """Return the exit code. Python's own look at all processes, when it starts another one, waits for none."""
        if sys._getframe(1).f_code.co_name != "_cleanup":
            self.processes.run()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Run all processes that have been started; return the exit code."""
        self.processes.run()
        return self.returncode

    def terminate(self) -> None:
        """Nothing to do: a rank ends with its function."""

    kill = interrupt = terminate

    def close(self) -> None:
        """Close what stands for the end of the process."""
        os.close(self.sentinel)


class Processes:
    """The processes that a program has started and that have not run yet. launcher: the run, see `program.py`."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher
        self.waiting: list[tuple[RankPopen, Callable[[], Any], bool]] = []
        self.loading: Any = None  # the rank that executes the program's file at the moment

    def start(self, popen: RankPopen, process: Any, forked: bool) -> None:
        """Keep a process until the program waits for one."""
        if self.loading is current_rank():
            raise BeforeFork
        rank, site = current_rank().comm.rank, call_site(sys._getframe(1))
        if not self.launcher.is_main():
            raise UsageError(
                f"rank {rank} starts a process at {site}; a program that runs on every rank cannot start ranks: start"
                " them before init_process_group, in a program that is not a rank"
            )
        try:
            pickled: Pickled | None = dumps(process, forked)
        except (pickle.PicklingError, AttributeError, TypeError):
            if not forked:
                raise
            pickled = None  # a forked process has its function without pickling it
        self.waiting.append((popen, self._program(process, pickled, forked), forked))

    def _program(self, process: Any, pickled: "Pickled | None", forked: bool) -> Callable[[], Any]:
        program = self.launcher.program
        kept = values_of_main() if forked else {}

        def run() -> None:
            if isinstance(program, UserProgram):
                self.loading = current_rank()
                try:
                    program.run("__mp_main__")
                except BeforeFork:
                    if not forked:
                        raise RuntimeError(
                            "the program starts processes while it is imported by one; start them inside"
                            ' `if __name__ == "__main__":`'
                        ) from None
                finally:
                    self.loading = None
                vars(sys.modules["__main__"]).update(copies(kept))
            (loads(pickled) if pickled else process).run()

        return run

    def run(self) -> None:
        """Run what has been started as the ranks of one world."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            self.launcher.run_processes([program for _, program, _ in waiting], waiting[0][2])
            for popen, _, _ in waiting:
                popen.returncode = 0


class Spawned:
    """What mp.spawn(join=False) returns."""

    def __init__(self, processes: list[Any]) -> None:
        self.processes = processes

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        for process in self.processes:
            process.join()
        return True


def start_processes(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    **_: Any,
) -> Spawned | None:
    """Take the place of torch.multiprocessing.start_processes and spawn: start `fn(i, *args)` for each i."""
    context: Any = multiprocessing.get_context(start_method)
    processes = [context.Process(target=fn, args=(i, *args), daemon=daemon) for i in range(nprocs)]
    for process in processes:
        process.start()
    spawned = Spawned(processes)
    if not join:
        return spawned
    spawned.join()
    return None


class RankQueue:
    """Takes the place of a queue between processes. Whoever waits for a value lets other ranks run."""

    def __init__(self, processes: Processes) -> None:
        self.processes, self.shared, self.values = processes, Shared(), deque[Pickled]()

    def put(self, value: Any, block: bool = True, timeout: float | None = None) -> None:
        """Append a copy of a value."""
        self.values.append(dumps(value, False))
        self.shared.changed()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take the first value, once there is one."""
        if self.empty() and not block:
            raise queue.Empty
        self.shared.wait(lambda: bool(self.values), "queue.get()")
        return loads(self.values.popleft())

    put_nowait, get_nowait = put, partialmethod(get, block=False)

    def empty(self) -> bool:
        if not self.values and self.processes.launcher.is_main():
            self.processes.run()
        return not self.values

    def full(self) -> bool:
        """Return that there is room."""
        return False

    def qsize(self) -> int:
        return len(self.values)

    def close(self) -> None:
        """Nothing to do."""

    join_thread = cancel_join_thread = task_done = join = close


class _Pickler(pickle.Pickler):
    """Pickles as between processes: tensors by their memory, what belongs to multiprocessing as it is."""

    def __init__(self, file: Any, forked: bool) -> None:
        super().__init__(file)
        self.forked, self.objects = forked, dict[int, Any]()

    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if kind in (torch.Tensor, nn.Parameter):
            if self.forked and not value.is_shared():
                return None
            alias = value.detach().requires_grad_(value.requires_grad)
            value = nn.Parameter(alias, value.requires_grad) if kind is nn.Parameter else alias
        elif kind is not RankQueue and (
            kind.__module__.partition(".")[0] != "multiprocessing"
            or isinstance(value, multiprocessing.process.BaseProcess)
        ):
            return None
        self.objects[id(value)] = value
        return id(value)


class Pickled(NamedTuple):
    """A value as bytes, and what is shared instead of copied, by number."""

    data: bytes
    objects: dict[int, Any]


def dumps(value: Any, forked: bool) -> Pickled:
    """Return a value pickled as between processes."""
    file = io.BytesIO()
    pickler = _Pickler(file, forked)
    pickler.dump(value)
    return Pickled(file.getvalue(), pickler.objects)


def loads(pickled: Pickled) -> Any:
    """Return the value that `dumps` has been given, of the modules that this rank has imported."""
    unpickler: Any = pickle.Unpickler(io.BytesIO(pickled.data))
    unpickler.persistent_load = pickled.objects.__getitem__
    return unpickler.load()


def values_of_main() -> dict[str, Any]:
    """Return the values in the program's namespace that are neither functions, classes nor modules."""
    kinds = FunctionType | type | ModuleType
    values = vars(sys.modules["__main__"]).items()
    return {name: value for name, value in values if not name.startswith("__") and not isinstance(value, kinds)}


def copies(values: dict[str, Any]) -> dict[str, Any]:
    """Return copies, as a forked process has them; a value that cannot be copied is shared."""
    result = {}
    for name, value in values.items():
        try:
            shared = isinstance(value, RankQueue) or (isinstance(value, torch.Tensor) and value.is_shared())
            result[name] = value if shared else copy.deepcopy(value)
        except Exception:
            result[name] = value
    return result


def _of_python() -> bool:
    """Return whether a library starts a process, or makes a queue, that has nothing to do with ranks."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "multiprocessing.process":
        frame = frame.f_back
    name = frame.f_globals.get("__name__") or ""
    return not in_rank() or any(name == other or name.startswith(other + ".") for other in OF_PYTHON)


def without_ranks(original: Any) -> Callable[..., Any]:
    """Return `subprocess.Popen.__init__`, which refuses to start ranks: they would be real processes."""

    def init(self: Any, args: Any, *rest: Any, **settings: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, list | tuple) else os.fsdecode(args).split()
        rank = (settings.get("env") or os.environ).get("RANK")
        starts = any(word in STARTERS or os.path.basename(word) == "torchrun" for word in words)
        if in_rank() and (starts or rank != os.environ.get("RANK")):
            raise UsageError(
                f"rank {current_rank().comm.rank} starts ranks with subprocess at {call_site(sys._getframe(1))}; give"
                " their script to minidist torch --ranks N instead"
            )
        original(self, args, *rest, **settings)

    return init


@contextmanager
def processes_as_ranks(launcher: Any) -> Iterator[Processes]:
    """Let processes that a rank's thread starts inside the block be ranks."""
    processes = Processes(launcher)

    def popen(original: Any) -> Any:
        def start(process: Any) -> Any:
            if _of_python():
                return original(process)
            method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
            return RankPopen(processes, process, method != "spawn")

        return staticmethod(start)

    def queue_of(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **kwargs) if _of_python() else RankQueue(processes)

    def changes() -> Changes:
        for name in ("Process", "SpawnProcess", "ForkProcess", "ForkServerProcess"):
            if kind := getattr(contexts, name, None):
                yield kind, "_Popen", popen(kind._Popen)
        for holder in (contexts.BaseContext, multiprocessing, torch_multiprocessing):
            for name in QUEUES:
                yield holder, name, queue_of(getattr(holder, name))
        for module in (torch_multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
            for name in ("spawn", "start_processes"):
                yield module, name, start_processes
        yield subprocess.Popen, "__init__", without_ranks(subprocess.Popen.__init__)

    with replaced(changes()):
        yield processes
