"""Every process of mpiexec has its own command line and its own files: what must be equal is compared at the start.

Ranks with different learning rates or seeds would train on, each by its own settings, and report no error. So each
rank sends the others a fingerprint of its settings, and where fingerprints differ also the settings. These messages use
a communicator that only the world uses, and they do not appear in the trace.

Simulated ranks run one program with one set of settings, so there is nothing to compare.

Proved by: tests/comm/mpi/test_agreement.py
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minidist.comm.mpi.waits import Entering
from minidist.comm.mpi.world import MPIWorld
from minidist.core.base.errors import UsageError
from minidist.core.base.random import fingerprint
from minidist.core.comm.communicator import Comm

MAX_SHOWN = 8  # ranks of one value that are listed


def check_same_settings(comm: Comm, settings: Mapping[str, Any]) -> None:
    """Raise UsageError, the same on every rank, when the ranks of the world have different settings.

    settings: what must be equal, by the name that a user knows it by. Every rank calls it; in the simulated world
    nothing happens.
    """
    world = comm.world
    if not isinstance(world, MPIWorld):
        return

    # The watchdog reports a rank that waits here for one that never comes.
    world.waiting = Entering(comm, text="comparing its settings with those of all ranks")
    mine = {name: str(value) for name, value in settings.items()}
    prints = world.base.allgather(fingerprint(repr(sorted(mine.items()))).tobytes())
    if len(set(prints)) > 1:
        raise UsageError(difference(world.base.allgather(mine)))
    world.waiting = None


def agreed(settings: Mapping[str, Any], main: Callable[..., Any], comm: Comm, *arguments: Any) -> Any:
    """Return what `main(comm, *arguments)` returns, after `check_same_settings`."""
    check_same_settings(comm, settings)
    return main(comm, *arguments)


def difference(settings: Sequence[Mapping[str, str]]) -> str:
    """Return the sentence about the settings of all ranks, in rank order: the first that differs, with all values."""
    names = dict.fromkeys(name for mine in settings for name in mine)
    different = [name for name in names if len({mine.get(name) for mine in settings}) > 1]

    # Which ranks have which value.
    ranks: dict[str | None, list[int]] = {}
    for rank, mine in enumerate(settings):
        ranks.setdefault(mine.get(different[0]), []).append(rank)
    values = ", ".join(f"{'absent' if value is None else value[:80]} on {_ranks(who)}" for value, who in ranks.items())
    others = f" (and {', '.join(different[1:4])}{', ...' if len(different) > 4 else ''})" if different[1:] else ""
    return (
        f"the ranks were started with different settings: {different[0]} is {values}{others}; start every rank with the"
        " same command line and files"
    )


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:MAX_SHOWN])) + (", ..." if len(numbers) > MAX_SHOWN else "")
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"
