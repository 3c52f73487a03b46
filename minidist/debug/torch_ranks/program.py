"""Runs a program of torch.distributed on simulated ranks, once or in several orders, and counts what was sent.

Proved by: tests/torch_ranks/test_program.py
"""

import math
import multiprocessing.process
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from minidist.base.traces import Trace, sequences
from minidist.base.user_file import ProgramError, is_user_function, load_function
from minidist.comm import SimWorld
from minidist.comm.call_site import CallSite
from minidist.comm.communicator import CheckedComm
from minidist.comm.sim.choosers import seeded
from minidist.core.base.errors import MinidistError
from minidist.core.comm.sim.matching import Stream
from minidist.debug import user_program
from minidist.debug.rank_process import Beginning, RankProcess, UserModules, own_process_state
from minidist.debug.results import unlike_line
from minidist.debug.torch_ranks.cuda import CpuForCuda, CudaOnCpu, cuda_on_cpu
from minidist.debug.torch_ranks.isolation import TorchState, isolated, random_numbers_from, replaced
from minidist.debug.torch_ranks.process_group import register
from minidist.debug.torch_ranks.processes import Processes, processes_as_ranks
from minidist.debug.torch_ranks.rank_thread import RankThread, current_rank
from minidist.debug.torch_ranks.tensors_in_flight import Races
from minidist.debug.user_program import UserProgram

TESTED = (2, 6), (2, 13)  # the first and the last version of torch with which the tests have run


@dataclass(frozen=True)
class Settings:
    """How a program runs. seed: of the random numbers of every rank. own: see UserModules. cuda: "cpu" or "real"."""

    seed: int = 0
    own: Sequence[str] = ()
    cuda: str = "real"


@dataclass(frozen=True)
class TorchRun:
    """What a run leaves behind: one world, or one for each time that the program has started processes.

    results: by rank of the last world. outputs: by rank; the last one, of a program that starts processes, its own.
    groups: communicator -> torch's description of the group. first_cuda: the line at which CUDA was named.
    """

    worlds: list[SimWorld]
    results: list[Any]
    outputs: list[str]
    groups: dict[str, str]
    first_cuda: CallSite | None

    @property
    def world(self) -> SimWorld:
        """The last world."""
        return self.worlds[-1]

    @property
    def traces(self) -> list[Trace]:
        """The records of all ranks of all worlds."""
        return [trace for world in self.worlds for trace in world.traces]

    @property
    def has_communicated(self) -> bool:
        """Return whether any rank has sent a message or made a process group."""
        return bool(self.groups) or any(trace.messages for trace in self.traces)

    @property
    def virtual_seconds(self) -> float:
        """Virtual seconds of communication, of all worlds."""
        return sum(world.end_time for world in self.worlds)


def run_on_ranks(
    program: Callable[[], Any] | UserProgram,
    ranks: int,
    make_world: Callable[..., SimWorld] = SimWorld,
    settings: Settings = Settings(),
    at_end: Callable[[SimWorld], None] = lambda world: None,
    **options: Any,
) -> TorchRun:
    """Run `program` on every rank, each in its thread; or once, where it starts processes, which are the ranks.

    make_world, options: the simulated world. at_end: called with the last world when the run has ended, in an error,
    too. The program calls `init_process_group` itself, as under torchrun. Errors are those of SimWorld.run: a
    DeadlockError names every rank's operation with the program's line.
    """
    register()
    run = _Run(program, settings, lambda ranks: make_world(ranks, **options))
    with ExitStack() as stack:
        stack.callback(lambda: at_end(run.worlds[-1]) if run.worlds else None)
        beginning = stack.enter_context(own_process_state(UserModules(settings.own)))
        generator = stack.enter_context(random_numbers_from(settings.seed))
        stack.enter_context(isolated())
        if settings.cuda == "cpu":
            run.cuda = stack.enter_context(cuda_on_cpu(ranks))
        run.processes = stack.enter_context(processes_as_ranks(run))
        start = _Start(beginning, generator, torch.get_default_dtype())
        mains: list[Callable[[], Any]]
        if isinstance(program, UserProgram):
            mains = [partial(program.run, local_rank=rank) for rank in range(ranks)]
        else:
            mains = [program] * ranks
        results = run.run_world(mains, start)
    worlds = run.worlds[1:] if run.main is not None else run.worlds
    outputs = [run.outputs[rank] for rank in sorted(run.outputs)]
    return TorchRun(
        worlds or run.worlds,
        results if run.main is None else run.results,
        outputs,
        run.groups,
        run.cuda.first_use if run.cuda else None,
    )


class _Start(NamedTuple):
    """What the ranks of a world begin with."""

    process: Beginning
    generator: torch.Tensor
    dtype: torch.dtype


class _Run:
    """One run of a program. main: the rank whose program starts processes, and which is then none."""

    def __init__(
        self, program: Callable[[], Any] | UserProgram, settings: Settings, make_world: Callable[[int], SimWorld]
    ) -> None:
        self.program, self.settings, self.make_world = program, settings, make_world
        self.worlds: list[SimWorld] = []
        self.outputs: dict[float, str] = {}
        self.groups: dict[str, str] = {}
        self.results: list[Any] = []
        self.cuda: CudaOnCpu | None = None
        self.processes: Processes
        self.threads: list[RankThread] = []
        self.states: dict[RankThread, tuple[RankProcess, TorchState]] = {}
        self.main: RankThread | None = None
        self.races = Races()

    def run_world(self, programs: Sequence[Callable[[], Any]], start: _Start) -> list[Any]:
        """Run one program on each rank of a new world, and return what they return."""
        world = self.make_world(len(programs))
        self.worlds.append(world)
        try:
            results = world.run(lambda comm: self.of_rank(comm, programs[comm.rank], start))
            self.races.check()
            return results
        except MinidistError as error:
            notes: list[str] = getattr(error, "__notes__", [])
            if self.main is not None and world is self.worlds[0] and notes and notes[-1].startswith("raised on rank"):
                notes.pop()  # the program that starts processes is no rank
            self.races.add_to(error)
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the program: what it passed of ours and of torch's says nothing
            ours = (__file__, user_program.__file__, multiprocessing.process.__file__)
            failure = ProgramError(error, *ours)
            self.races.add_to(failure)
            raise failure from None

    def of_rank(self, comm: CheckedComm, program: Callable[[], Any], start: _Start) -> Any:
        """Run a rank's program in a thread, and return what it returns."""
        if self.main is not None and comm.world is self.worlds[0]:
            return None  # the program that starts processes runs once
        process = RankProcess(start.process, variables_of(comm.rank, comm.size, start.process.variables))
        state = TorchState(start.generator, start.dtype)

        def enter() -> None:
            process.enter()
            state.enter()
            self.worlds[0].switches += 1  # it is not this world that hangs

        def leave() -> None:
            state.leave()
            process.leave()

        thread = RankThread(comm, lambda: self.to_its_end(program), leave, enter)
        thread.races = self.races
        self.threads.append(thread)
        self.states[thread] = process, state
        return thread.run()

    def to_its_end(self, program: Callable[[], Any]) -> Any:
        """Run a rank's program, and what it has begun and not waited for. Called in its thread."""
        thread = current_rank()
        output = self.states[thread][0].output
        torch.autograd.set_multithreading_enabled(False)
        try:
            with CpuForCuda(self.cuda) if self.cuda is not None else nullcontext():
                result = program()
            for work in thread.open_works:
                work.wait()
            self.processes.run()  # as Python waits for its processes at exit
        finally:
            output.flush()
            rank = math.inf if thread is self.main else thread.comm.rank
            self.outputs[rank] = self.outputs.get(rank, "") + output.written.getvalue()
            self.groups.update({group.comm.name: group.group_desc for group in thread.groups})
        return result

    # of a program that starts processes -------------------------------------------------------------------------------

    def is_main(self) -> bool:
        """Return whether the calling thread may start ranks: it runs alone, and has not communicated."""
        thread = current_rank()
        alone = self.main is None and self.threads == [thread] and not thread.groups
        return thread is self.main or alone

    def run_processes(self, programs: list[Callable[[], Any]], forked: bool) -> None:
        """Run a world of one rank for each process that the program has started."""
        main = self.main = current_rank()
        process, state = self.states[main]

        def run() -> None:
            began = replace(process.beginning, variables=process.variables, folder=process.folder)
            began = replace(began, argv=process.argv, path=list(process.path))
            # A forked process has the random numbers of the program, a spawned one those of a process that begins.
            with random_numbers_from(None if forked else self.settings.seed) as generator:
                dtype = state.dtype if forked else torch.float32
                self.results = self.run_world(programs, _Start(began, generator, dtype))

        main.call(run)


def run_in_orders(
    program: Callable[[], Any] | UserProgram,
    ranks: int,
    orders: int,
    at_end: Callable[[SimWorld], None] = lambda world: None,
    **options: Any,
) -> tuple[TorchRun, str]:
    """Run a program, and then with its ranks in `orders` other orders; return the first run, and what differs, if any.

    at_end: of the first run. It and the options are those of `run_on_ranks`.
    """
    first = run_on_ranks(program, ranks, at_end=at_end, **options)
    for order in range(orders):
        other = run_on_ranks(program, ranks, partial(ShuffledWorld, seed=order), **options)
        if found := first_difference(first, other):
            return first, f"order {order} of {orders}: {found}; the program depends on the order of its ranks"
    return first, ""


@contextmanager
def groups_begin_when_asked(wanted: bool) -> Iterator[None]:
    """Let a program that begins no process group have one as soon as it asks for one, inside the block, if wanted."""
    name = "_get_default_group"
    get_group = getattr(distributed_c10d, name)

    def begin_and_get() -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return get_group()

    # In every module that has imported it by its name, such as DistributedDataParallel's.
    modules = list(sys.modules.values()) if wanted else []
    own = [module for module in modules if getattr(module, "__dict__", {}).get(name) is get_group]
    with replaced((module, name, begin_and_get) for module in own):
        yield


def variables_of(rank: int, size: int, given: Mapping[Any, Any]) -> dict[str, str]:
    """Return the environment variables of one rank, as torchrun sets them. given: those that the rank has already."""
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    of_size = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size, "GROUP_WORLD_SIZE": 1}
    elastic = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    names = {os.fsdecode(name) for name in given}
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    master = {name: value for name, value in master.items() if name not in names}
    return {name: str(value) for name, value in (of_rank | of_size | elastic | master).items()}


def load_program(
    source: str, arguments: Sequence[str] = (), is_module: bool = False
) -> Callable[[], Any] | UserProgram:
    """Return what every rank runs: FILE.py as `python FILE.py ARGUMENTS` does, a module as `python -m`, or a function.

    FILE.py:FUNCTION is imported by each rank, and called without arguments.
    """
    if is_user_function(source) and not is_module:
        return lambda: load_function(source)()
    program = UserProgram(source, arguments, is_module)
    program.check()
    return program


def version_warning() -> str:
    """Return a sentence where this is another version of torch than those with which the tests have run."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if TESTED[0] <= version <= TESTED[1]:
        return ""
    first, last = (".".join(map(str, each)) for each in TESTED)
    return f"this is torch {torch.__version__}; minidist torch is tested with {first} to {last}"


class ShuffledQueue(deque[Stream]):
    """A queue of the ranks that can run, in an order that a seed draws."""

    def __init__(self, streams: Iterable[Stream], seed: int) -> None:
        super().__init__(streams)
        self.random = random.Random(seed)

    def popleft(self) -> Stream:
        """Remove and return any of them."""
        self.rotate(-self.random.randrange(len(self)))
        return super().popleft()


class ShuffledWorld(SimWorld):
    """A world whose ranks run, and whose messages from any rank arrive, in another order for every seed.

    A program without races does not see a difference.
    """

    def __init__(self, ranks: int, seed: int, **options: Any) -> None:
        super().__init__(ranks, chooser=seeded(seed), **options)
        self.seed = seed

    def _ready_queue(self, streams: Sequence[Stream]) -> deque[Stream]:
        return ShuffledQueue(streams, self.seed)


def first_difference(first: TorchRun, other: TorchRun) -> str:
    """Return in what two runs of one program differ, "" for nothing: what a rank has printed, and its messages."""
    if found := unlike_line(first.outputs, other.outputs, first.world.size, "the first order"):
        return found
    if len(first.traces) != len(other.traces):
        return "the program starts another number of ranks than in the first order"
    for before_trace, trace in zip(first.traces, other.traces, strict=True):
        if sequences(before_trace) != sequences(trace):
            return f"rank {trace.rank} sends or receives other messages than in the first order"
    return ""


def as_arrays(value: Any) -> Any:
    """Return what a function has returned with NumPy arrays in place of its tensors."""
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().cpu().to(torch.float32 if whole.dtype == torch.bfloat16 else whole.dtype).numpy().copy()
    if isinstance(value, Mapping):
        return {key: as_arrays(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_arrays(inner) for inner in value]
    return value
