"""`minidist hang`: why a job of torch.distributed hangs, from the dumps of PyTorch's Flight Recorder.

Proved by: tests/commands/test_hang.py
"""

from pathlib import Path
from typing import Annotated

import typer

from minidist.base.errors import UsageError
from minidist.commands.flags import whole_numbers
from minidist.commands.output import Result, json_or_table


@json_or_table
def hang(
    folder: Annotated[Path, typer.Argument(help="the folder with one dump per rank, such as nccl_trace_rank_0")],
    write: Annotated[
        bool, typer.Option("--write", help="write dumps of simulated programs that hang, with labels, into the folder")
    ] = False,
    ranks: Annotated[str | None, typer.Option(help="with --write: numbers of ranks (default 2,4,8)")] = None,
    form: Annotated[str | None, typer.Option(help="with --write: pickle (default) or json")] = None,
) -> Result:
    """Read the dumps of PyTorch's Flight Recorder: which rank waits for which, and where the ranks differ first.

    The exit code is 1 when the job hangs, and 0 when every recorded operation has ended.
    """
    from minidist.debug.flight_recorder.corpus import write_corpus
    from minidist.debug.flight_recorder.diagnosis import diagnose
    from minidist.debug.flight_recorder.dump import read_dumps

    if not write:
        if ranks is not None or form is not None:
            raise UsageError(
                f"{'--ranks' if ranks is not None else '--form'} is of --write; leave it out, or add --write"
            )
        found = diagnose(read_dumps(folder))
        return Result(found.as_dict(), lambda: print("\n".join(found.lines())), 1 if found.hangs else 0)

    # A corpus, for whoever writes an analyser.
    labels = write_corpus(folder, whole_numbers(ranks, "--ranks") if ranks else (2, 4, 8), form or "pickle")
    return Result(labels, lambda: print(f"written: {len(labels)} jobs that hang, and {folder / 'labels.json'}"))
