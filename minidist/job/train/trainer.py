"""A job on a rank: which part of it this rank has, and the run that trains.

Proved by: tests/equality/test_equality.py, tests/train/test_axes.py, tests/train/test_account.py
"""

from collections.abc import Sequence
from contextlib import ExitStack

from minidist.base import arrays as xp
from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import account_memory
from minidist.core.comm import Comm
from minidist.job.config.rules import MEANING, check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.run import TIMELINE_RANKS, begin, serve
from minidist.job.train.state import Observer, TrainResult
from minidist.techniques import of_job, own_loop


def train(comm: Comm, config: TrainConfig, observers: Sequence[Observer] = (), timeline: bool = False) -> TrainResult:
    """Train on all ranks of `comm`, laid out as `recipe.parallelize` does.

    What each rank sends is in `planning/volumes.py` in closed form; in every case its micro-batches' losses (8 B each,
    purpose metrics), and at the start the first rank of the data axis sends the weights (purpose startup). timeline:
    write the memory in use over time into the trace, for the first steps and ranks. Errors: UsageError with the
    sentence of docs/rules.md when settings do not combine; a setting without effect is refused on command lines alone.
    """
    batches, world = resolve_batches(config, comm.size), comm
    check_rules(config, batches, 0, MEANING)
    loop = own_loop(config)
    if loop is not None:
        return loop.train(comm, observers)  # type: ignore[no-any-return]
    for extension in of_job(config):
        # The last ranks do something else; the others train as they would without them.
        if extension.beside(config):
            layout = range(batches.dims.ranks)
            if comm.rank not in layout:
                return serve(extension, comm, config, batches)
            comm = comm.group(layout, extension.trainers)

    clock = comm.time if timeline and comm.rank < TIMELINE_RANKS else None
    # quiet_overflow: an overflow is one error from `before_update`, not a warning in every step.
    with account_memory(clock=clock) as account, FlopCounter() as flops, xp.quiet_overflow(), ExitStack() as stack:
        run = begin(comm, world, config, batches, observers, stack)
        building = account.begin_peak()  # every rank builds the whole model, and keeps its part
        run.attach()
        run.flops, run.account = flops, account if clock is not None else None
        run.train(range(run.done, config.steps))
        return run.result(building, account)
