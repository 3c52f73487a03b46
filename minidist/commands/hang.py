"""`minidist hang`: why a job of torch.distributed hangs, from dumps of PyTorch's Flight Recorder and from text logs.

Proved by: tests/commands/test_hang.py
"""

from pathlib import Path
from typing import Annotated

from minidist.base.limits import check_count
from minidist.commands.command import Argument, Option, Result, json_or_table


@json_or_table
def hang(
    folder: Annotated[
        Path, Argument(help="the folder with one dump per rank, such as nccl_trace_rank_0, with logs, or one log")
    ],
    ranks: Annotated[int | None, Option(help="number of ranks of the job, where no file gives it")] = None,
) -> Result:
    """Read dumps of PyTorch's Flight Recorder, and logs: which rank waits for which, and where the ranks differ first.

    The exit code is 1 when the job hangs, and 0 when every recorded operation has ended.
    """
    from minidist.debug.flight_recorder.dump import MAX_RANKS
    from minidist.debug.flight_recorder.log_diagnosis import diagnose_files

    if ranks is not None:
        check_count(ranks, "--ranks", 1, MAX_RANKS)
    found = diagnose_files(folder, ranks or 0)
    return Result(found.as_dict(), lambda: print("\n".join(found.lines())), 1 if found.hangs else 0)
