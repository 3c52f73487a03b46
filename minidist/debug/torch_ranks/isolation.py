"""What the ranks of one process must not share of torch: process groups, random numbers, defaults, tables of classes.

Torch keeps its process groups in one object of a module, which is replaced by one that has other contents in every
thread. Random generators and the default dtype belong to the process; they are put away when a rank lets others run,
and back when it goes on. All of it is undone when the run is over. What is not torch's is in `debug/rank_process.py`.

Proved by: tests/torch_ranks/test_program.py
"""

import concurrent.futures
import importlib.util
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.profiler
from torch.distributed import distributed_c10d

from minidist.comm.call_site import call_site
from minidist.comm.sim.process_state import random_states, set_random_states
from minidist.core.base.errors import UsageError
from minidist.debug.torch_ranks.rank_thread import current_rank, in_rank
from minidist.debug.torch_ranks.store import RankFileStore, RankStore, RankTCPStore, Shared

BACKEND = "minidist"
# Tables that torch keeps in a class or a module: where, and under which names. Each rank has its own.
TABLES = {
    ("torch.distributed.fsdp._debug_utils", "SimpleProfiler"): ("results", "profiling"),
    ("torch.distributed.checkpoint.planner", "SavePlanner"): (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ),
    ("torch.distributed.tensor._random", ""): ("_rng_tracker",),
    ("torch.distributed.tensor._api", "DTensor._op_dispatcher"): ("_custom_op_handlers", "_allow_implicit_replication"),
    ("torch.nn.modules.module", ""): (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    ),
    ("multiprocessing.context", "_default_context"): ("_actual_context",),  # what set_start_method sets
}


class GroupsOfThread(threading.local):
    """What `distributed_c10d._world` holds, in every thread another one."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.pg_config_info: list[dict[str, Any]] = []


class TorchState:
    """What torch keeps for the whole process, of one rank: random numbers, the default dtype and the tables."""

    def __init__(self, generator: torch.Tensor, dtype: torch.dtype) -> None:
        self.generator, self.dtype = generator, dtype
        self.tables: dict[tuple[tuple[str, str], str], Any] = {}

    def enter(self) -> None:
        """Make the process this rank's: called in its thread, each time it goes on."""
        torch.set_rng_state(self.generator)
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        for place, holder, name in loaded_tables():
            own = self.tables.get((place, name))
            setattr(holder, name, first_table(holder, name) if own is None else own)

    def leave(self) -> None:
        """Keep what this rank has. The simulated world does so with the generators of Python and NumPy."""
        self.generator, self.dtype = torch.get_rng_state(), torch.get_default_dtype()
        self.tables = {(place, name): getattr(holder, name) for place, holder, name in loaded_tables()}


def loaded_tables() -> Iterator[tuple[tuple[str, str], Any, str]]:
    """Yield (place, object that holds the table, name) of the tables in modules that have been imported."""
    for place, names in TABLES.items():
        holder = sys.modules.get(place[0])
        for part in filter(None, place[1].split(".")):
            holder = getattr(holder, part, None)
        for name in names:
            if hasattr(holder, name):
                yield place, holder, name


def first_table(holder: Any, name: str) -> Any:
    """Return the table with which a rank begins: one of the same kind without entries; else False or None.

    That of DTensor's operations, to which `loss_parallel` adds some, has entries from its beginning.
    """
    table = getattr(holder, name)
    if name == "_custom_op_handlers":
        return getattr(type(holder)(), name)
    if not hasattr(table, "clear"):
        return False if isinstance(table, bool) else None
    new = table.copy()
    new.clear()
    return new


@contextmanager
def random_numbers_from(seed: int | None) -> Iterator[torch.Tensor]:
    """Let torch, NumPy and Python begin with a seed inside the block; with None as they are.

    Yields the state of torch's generator. After the block all have the numbers that they had before.
    """
    before = torch.get_rng_state(), random_states()
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield torch.get_rng_state()
    finally:
        torch.set_rng_state(before[0])
        set_random_states(before[1])


def submit_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ThreadPoolExecutor.submit`, which runs a rank's asynchronous checkpoint at once: it communicates."""

    def submit(pool: Any, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        if not in_rank() or not getattr(function, "__module__", "").startswith("torch.distributed.checkpoint"):
            return original(pool, function, *arguments, **keywords)
        future: Any = concurrent.futures.Future()
        try:
            future.set_result(function(*arguments, **keywords))
        except Exception as error:
            future.set_exception(error)
        return future

    return submit


def of_program(depth: int = 2) -> bool:
    """Return whether a rank's program or a library has called, rather than torch itself."""
    name = sys._getframe(depth).f_globals.get("__name__") or ""
    return in_rank() and name.partition(".")[0] != "torch"


Changes = Iterator[tuple[Any, str, Any]]  # (object, name of an attribute, what takes its place)


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let the attributes that this version of torch has be others inside the block."""
    with ExitStack() as stack:
        for holder, name, replacement in changes:
            if hasattr(holder, name):
                stack.enter_context(mock.patch.object(holder, name, replacement))
        yield


class _Finder:
    """Finds one module, as the other finders do."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the spec of the module, with a loader that changes it as soon as it has been imported."""
        if name != self.name:
            return None
        self.name = ""  # the others find it
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def when_imported(name: str, changes: Callable[[Any], Changes]) -> Iterator[None]:
    """Change a module when the program imports it inside the block: importing it now would take seconds.

    changes: of the module. All of them are undone after the block.
    """
    with ExitStack() as stack:

        def change(module: Any) -> None:
            stack.enter_context(replaced(changes(module)))

        if name in sys.modules:
            change(sys.modules[name])
        else:
            finder: Any = _Finder(name, change)
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        yield


def same_greeting(stages: Any) -> Changes:
    """Let stages of a pipeline greet each other in one dtype: torch 2.9 sends int64, and receives it as float32."""
    kind = stages._PipelineStageBase
    original = getattr(kind, "_get_init_p2p_neighbors_ops", None)

    def operations(stage: Any) -> list[Any]:
        result: list[Any] = original(stage)  # type: ignore[misc]
        for operation in result:
            operation.tensor = torch.zeros(1)
        return result

    if original is not None:
        yield kind, "_get_init_p2p_neighbors_ops", operations


def own_groups(module: Any) -> Changes:
    """Let functions whose default is the group of all ranks, as it was when a rank imported them, take every rank's."""
    for function in vars(module).values():
        defaults = getattr(function, "__defaults__", None) or ()
        own = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)
        if own != defaults:
            yield function, "__defaults__", own


def one_profiler() -> Changes:
    """Let one rank at a time profile: torch's profiler belongs to the process, which two of them end."""
    start, stop, active = torch.profiler.profile.start, torch.profiler.profile.stop, list[Any]()

    def start_if_alone(profiler: Any) -> None:
        if in_rank() and active and active != [current_rank()]:
            raise UsageError(
                f"rank {current_rank().comm.rank} starts PyTorch's profiler at {call_site(sys._getframe(1))} while rank"
                f" {active[0].comm.rank} profiles; let one rank profile, or use --trace"
            )
        active[:] = [current_rank()] if in_rank() else []
        start(profiler)

    def stop_and_leave(profiler: Any) -> None:
        active.clear()
        stop(profiler)

    yield torch.profiler.profile, "start", start_if_alone
    yield torch.profiler.profile, "stop", stop_and_leave


def backend_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `get_backend`, which tells a program the backend that it has asked for."""

    def get_backend(group: Any = None) -> Any:
        asked = getattr(group or dist.group.WORLD, "asked_for", "")
        return asked if asked and of_program() else original(group)

    return get_backend


def simulated_groups() -> Changes:
    """Let every process group be one of the simulated world, in torch's own objects: each thread has other contents."""
    pool, make_group = concurrent.futures.ThreadPoolExecutor, distributed_c10d._new_process_group_helper

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
        """Take the place of torch's, by which processes find each other: the ranks of a world know each other."""
        if not in_rank():
            raise UsageError("init_process_group outside of a rank's own thread; call it in the main program")
        comm = current_rank().comm
        for name, given, wanted in (("rank", rank, comm.rank), ("world_size", world_size, comm.size)):
            if given not in (-1, wanted):
                raise UsageError(
                    f"init_process_group({name}={given}) on rank {comm.rank} of {comm.size}; read RANK and WORLD_SIZE"
                    " from the environment, or leave it out"
                )
        store = RankStore(RankStore.of_run.setdefault(("rendezvous", comm.world), Shared()))
        yield store, comm.rank, comm.size

    def make_simulated_group(
        group_size: int, group_rank: int, ranks: Any, backend: Any, *arguments: Any, **settings: Any
    ) -> Any:
        """Take the place of torch's: every group is one of the simulated world, whatever backend is asked for."""
        settings.update(backend_options=None, device_id=None)
        made = make_group(group_size, group_rank, ranks, dist.Backend(BACKEND), *arguments, **settings)
        if isinstance(made[0], dist.ProcessGroup):
            asked = "gloo" if str(backend) == "undefined" else str(backend)
            made[0].asked_for = getattr(dist.group.WORLD, "asked_for", "") if asked == BACKEND else asked
        return made

    yield distributed_c10d, "_world", GroupsOfThread()
    yield distributed_c10d, "rendezvous", rendezvous
    yield distributed_c10d, "_new_process_group_helper", make_simulated_group
    # That of NCCL is known where NCCL is.
    yield distributed_c10d, "_get_default_timeout", lambda *_: distributed_c10d.default_pg_timeout
    yield sys, "excepthook", sys.excepthook  # torch puts the rank before an error
    yield pool, "submit", submit_here(pool.submit)
    yield RankStore, "of_run", {}
    for module in (dist, distributed_c10d):
        yield module, "get_backend", backend_of(dist.get_backend)
        yield module, "TCPStore", RankTCPStore
        yield module, "FileStore", RankFileStore


@contextmanager
def isolated() -> Iterator[None]:
    """Keep the process groups of ranks apart inside the block, and let them be groups of the simulated world."""
    with ExitStack() as stack:
        stack.enter_context(replaced(chain(simulated_groups(), one_profiler())))
        stack.enter_context(when_imported("torch.distributed.pipelining.stage", same_greeting))
        stack.enter_context(when_imported("torch.distributed.nn.functional", own_groups))
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        stack.callback(torch._C._distributed_c10d._set_thread_isolation_mode, False)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        yield
