"""`minidist hang`: why a job of torch.distributed hangs, from dumps of PyTorch's Flight Recorder and from text logs.

Proved by: tests/commands/test_hang.py
"""

from pathlib import Path
from typing import Annotated

from minidist.base.errors import UsageError, quoted
from minidist.commands.command import Argument, Option, Result, json_or_table
from minidist.commands.flags import whole_numbers


@json_or_table
def hang(
    folder: Annotated[
        Path, Argument(help="the folder with one dump per rank, such as nccl_trace_rank_0, with logs, or one log")
    ],
    write: Annotated[
        bool, Option("--write", help="write dumps of simulated programs that hang, with labels, into the folder")
    ] = False,
    ranks: Annotated[
        str | None,
        Option(help="number of ranks of the job, where no file gives it; with --write: some (default 2,4,8)"),
    ] = None,
    form: Annotated[str | None, Option(help="with --write: pickle (default) or json")] = None,
) -> Result:
    """Read dumps of PyTorch's Flight Recorder, and logs: which rank waits for which, and where the ranks differ first.

    The exit code is 1 when the job hangs, and 0 when every recorded operation has ended.
    """
    from minidist.debug.flight_recorder.corpus import write_corpus
    from minidist.debug.flight_recorder.dump import MAX_RANKS
    from minidist.debug.flight_recorder.log_diagnosis import diagnose_files

    if not write:
        if form is not None:
            raise UsageError("--form is of --write; leave it out, or add --write")
        world = whole_numbers(ranks, "--ranks") if ranks is not None else [0]
        if ranks is not None and (len(world) > 1 or not 0 < world[0] <= MAX_RANKS):
            raise UsageError(f"--ranks {quoted(ranks)}; without --write it must be one number from 1 to {MAX_RANKS:,}")
        found = diagnose_files(folder, world[0])
        return Result(found.as_dict(), lambda: print("\n".join(found.lines())), 1 if found.hangs else 0)

    # A corpus, for whoever writes an analyser.
    labels = write_corpus(folder, whole_numbers(ranks, "--ranks") if ranks else (2, 4, 8), form or "pickle")
    return Result(labels, lambda: print(f"written: {len(labels)} jobs that hang, and {folder / 'labels.json'}"))
