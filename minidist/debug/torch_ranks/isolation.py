"""What the ranks of one process must not share: torch's process groups, random numbers and environment variables.

Torch keeps its process groups in one object of a module, which is replaced by one that has other contents in every
thread. Random generators and RANK belong to the process; they are put away when a rank lets others run, and back when
it goes on. All of it is undone when the run is over.

Proved by: tests/torch_ranks/test_program.py
"""

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from minidist.base.errors import UsageError
from minidist.debug.torch_ranks.rank_thread import in_rank

BACKEND = "minidist"
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


class Output(io.TextIOBase):
    """The standard output of one rank: passed on line by line, as the output of processes is, and kept."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.written, self._line = stream, io.StringIO(), ""

    def write(self, text: str) -> int:
        """Keep a text, and pass on the lines that it ends."""
        self.written.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Pass on what stands in an unfinished line."""
        self.stream.write(self._line)
        self._line = ""
        self.stream.flush()


class RankState:
    """The random generators, environment variables and output of one rank, as `torchrun` would set them.

    All ranks begin with the random numbers of the process, as processes that are started alike do.
    """

    def __init__(self, rank: int, size: int, generator: torch.Tensor) -> None:
        self.output = Output(sys.stdout)
        self.environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }
        self.generator = generator

    def put_away(self) -> None:
        """Keep torch's random generator as this rank has left it, and give the process its own output back.

        The simulated world does so with the generators of Python and NumPy (`comm/sim/process_state.py`).
        """
        sys.stdout = self.output.stream
        self.generator = torch.get_rng_state()

    def put_back(self) -> None:
        """Make the process this rank's: called in its thread, each time it goes on."""
        os.environ.update(self.environment)
        sys.stdout = self.output
        torch.set_rng_state(self.generator)


@contextmanager
def isolated(size: int) -> Iterator[None]:
    """Keep the process groups of `size` ranks apart inside the block, and let them be groups of the simulated world."""
    store = dist.HashStore()
    make_group = distributed_c10d._new_process_group_helper

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
        """Take the place of torch's, by which processes find each other: the ranks of a world know each other."""
        if not in_rank():
            raise UsageError("init_process_group outside of a rank's own thread; call it in the main program")
        mine = int(os.environ["RANK"])
        for name, given, wanted in (("rank", rank, mine), ("world_size", world_size, size)):
            if given not in (-1, wanted):
                raise UsageError(
                    f"init_process_group({name}={given}) on rank {mine} of {size}; read RANK and WORLD_SIZE from the"
                    " environment, or leave it out"
                )
        yield store, mine, size

    def make_simulated_group(
        group_size: int, group_rank: int, ranks: Any, backend: Any, *arguments: Any, **settings: Any
    ) -> Any:
        """Take the place of torch's: every group is one of the simulated world, whatever backend is asked for."""
        settings.update(backend_options=None, device_id=None)
        return make_group(group_size, group_rank, ranks, dist.Backend(BACKEND), *arguments, **settings)

    with ExitStack() as stack:
        # Threads of one process see one object each in place of torch's own.
        stack.enter_context(mock.patch.object(distributed_c10d, "_world", GroupsOfThread()))
        stack.enter_context(mock.patch.object(distributed_c10d, "rendezvous", rendezvous))
        stack.enter_context(mock.patch.object(distributed_c10d, "_new_process_group_helper", make_simulated_group))
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))  # torch puts the rank before an error
        stack.enter_context(mock.patch.dict(os.environ))
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        stack.callback(torch._C._distributed_c10d._set_thread_isolation_mode, False)
        yield
