"""Runs a program of torch.distributed on simulated ranks, once or in several orders, and counts what was sent.

Proved by: tests/torch_ranks/test_program.py
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from minidist.base.errors import BufferReuseError, MinidistError, UsageError, quoted, quoted_path, reason
from minidist.base.user_file import ProgramError, is_user_function, load_function
from minidist.comm import Comm, SimWorld
from minidist.comm.sim.choosers import seeded
from minidist.comm.sim.state import Stream
from minidist.debug.torch_ranks.isolation import RankState, isolated
from minidist.debug.torch_ranks.process_group import register
from minidist.debug.torch_ranks.rank_thread import RankThread
from minidist.debug.torch_ranks.tensors_in_flight import Races

TESTED = "2.13"  # the version of torch with which the tests run


@dataclass(frozen=True)
class TorchRun:
    """What a run leaves behind. results, outputs: by rank. groups: communicator -> torch's description of the group."""

    world: SimWorld
    results: list[Any]
    outputs: list[str]
    groups: dict[str, str]


def run_on_ranks(
    program: Callable[[], Any], ranks: int, make_world: Callable[..., SimWorld] = SimWorld, **options: Any
) -> TorchRun:
    """Run `program` on every rank, each in a thread of its own.

    make_world, options: the simulated world. The program calls `init_process_group` itself, as under torchrun. Errors
    are those of SimWorld.run: a DeadlockError names every rank's operation with the program's line.
    """
    register()
    world, races = make_world(ranks, **options), Races()
    outputs, groups = [""] * ranks, {"world": "default_pg"}
    generator = torch.get_rng_state()

    def of_rank(comm: Comm) -> Any:
        state = RankState(comm.rank, comm.size, generator)

        def with_its_works() -> Any:
            torch.autograd.set_multithreading_enabled(False)
            try:
                result = program()
                # Operations that the program has begun and not waited for end with the program.
                for work in thread.open_works:
                    work.wait()
            finally:
                state.output.flush()
                outputs[comm.rank] = state.output.written.getvalue()
                groups.update({group.comm.name: group.group_desc for group in thread.groups})
            return result

        thread = RankThread(comm, with_its_works, state.put_away, state.put_back)
        thread.races = races
        return thread.run()

    with isolated(ranks):
        try:
            results = world.run(of_rank)
            races.check()
        except MinidistError as error:
            for race in races.sentences if not isinstance(error, BufferReuseError) else ():
                error.add_note(race)
            raise
        except (Exception, SystemExit) as error:  # of the program: what it passed of ours and of torch's says nothing
            raise ProgramError(error, __file__) from None
    return TorchRun(world, results, outputs, groups)


@contextmanager
def groups_begin_when_asked(wanted: bool) -> Iterator[None]:
    """Let a program that begins no process group have one as soon as it asks for one, inside the block, if wanted."""
    name = "_get_default_group"
    get_group = getattr(distributed_c10d, name)

    def begin_and_get() -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return get_group()

    with ExitStack() as stack:
        # In every module that has imported it by its name, such as DistributedDataParallel's.
        for module in list(sys.modules.values()) if wanted else ():
            if getattr(module, "__dict__", {}).get(name) is get_group:
                stack.enter_context(mock.patch.object(module, name, begin_and_get))
        yield


def load_program(source: str, arguments: Sequence[str] = ()) -> Callable[[], Any]:
    """Return what every rank runs: FILE.py as `python FILE.py ARGUMENTS` does, or FILE.py:FUNCTION, called without any.

    Each rank runs a file in a namespace of its own.
    """
    if is_user_function(source):
        return load_function(source)
    path = Path(source)
    try:
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    except (OSError, ValueError) as error:
        raise UsageError(f"{quoted_path(source)} cannot be read ({reason(error)}); give a Python file") from None
    except SyntaxError as error:
        raise UsageError(f"{quoted_path(source)} line {error.lineno}: {error.msg}; correct the file") from None
    folder = str(path.resolve().parent)

    def program() -> None:
        if folder not in sys.path:
            sys.path.insert(0, folder)
        sys.argv = [source, *arguments]
        exec(code, {"__name__": "__main__", "__file__": source, "__builtins__": __builtins__})

    return program


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
    for rank, (before, now) in enumerate(zip(first.outputs, other.outputs, strict=True)):
        for line, pair in enumerate(zip_longest(before.splitlines(), now.splitlines(), fillvalue=""), 1):
            if pair[0] != pair[1]:
                return f"rank {rank} prints {quoted(pair[1])} in line {line}, and {quoted(pair[0])} in the first order"
    for before_trace, trace in zip(first.world.traces, other.world.traces, strict=True):
        if before_trace.sequences() != trace.sequences():
            return f"rank {trace.rank} sends or receives other messages than in the first order"
    return ""


def bytes_by_operation(run: TorchRun) -> list[dict[str, Any]]:
    """Return what all ranks have sent, a row for each group and operation: its description, messages and bytes."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for trace in run.world.traces:
        for message in trace.sent():
            group = run.groups.get(message.communicator, message.communicator)
            operation = "send" if message.operation == "message" else message.operation
            row = rows.setdefault(
                (group, operation), {"group": group, "operation": operation, "messages": 0, "bytes": 0}
            )
            row["messages"] += 1
            row["bytes"] += message.nbytes
    return sorted(rows.values(), key=lambda row: (-row["bytes"], row["group"], row["operation"]))


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
