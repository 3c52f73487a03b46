"""The files that people have of a job that hangs: dumps of the Flight Recorder, text logs, or both in one folder.

    nccl_trace_rank_3, rank3.json    the name ends in a number, and the content is a dump: of rank 3
    job.log, slurm-812345, 3/stderr.log    any other text: a log, of all ranks or of the one that its name gives

Proved by: tests/flight_recorder/test_files.py, tests/flight_recorder/test_dump.py
"""

import re
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted_path, reason
from minidist.base.plain_pickle import BadPickleError, read_plain_pickle
from minidist.base.read_file import check_path, parse_json
from minidist.debug.flight_recorder.dump import BadDumpError, Dump, dump_of
from minidist.debug.flight_recorder.log_lines import is_text
from minidist.debug.flight_recorder.logs import Log, read_log

MAX_FILES = 4_096
MAX_BYTES = 64_000_000  # of a dump; a ring buffer of 20,000 operations with their frames has about 20 MB
REMEDY = "give the folder with one dump of PyTorch's Flight Recorder per rank, or the logs of the job"


def read_files(path: str | Path) -> tuple[list[Dump], Log]:
    """Return the dumps by rank, and what the logs say, of a folder or of one file.

    A file whose name ends in the number of a rank is a dump, or else a log; of the others the texts are logs. Where a
    folder has neither, the texts in its folders are read: torchrun makes one for each rank.
    """
    dumps: dict[int, Dump] = {}
    log = Log()
    for file in files_of(path):
        rank = rank_of(file)
        if rank is None:
            read_text(file, log)
            continue
        try:
            dump = read_dump(file, rank)
        except BadDumpError:
            if not read_text(file, log):
                raise
            continue
        if rank in dumps:
            raise UsageError(f"{quoted_path(path)} has two dumps of rank {rank}; remove the older one")
        dumps[rank] = dump
    if not dumps and not log and Path(path).is_dir():
        for file in sorted(Path(path).rglob("*"))[:MAX_FILES]:
            if file.is_file():
                read_text(file, log)
    if not dumps and not log:
        none = "no line of a watchdog, of gloo or of a monitored barrier"
        if Path(path).is_dir():
            none = f"no file whose name ends in the number of a rank, and in its texts {none}"
        raise UsageError(f"{quoted_path(path)} has {none}; {REMEDY}")
    return [dumps[rank] for rank in sorted(dumps)], log


def read_text(file: Path, log: Log) -> bool:
    """Read a file into the log, if it is a text; return whether it tells of a hang."""
    try:
        with file.open("rb") as opened:
            if not is_text(opened.read(4096)):
                return False
    except OSError:
        return False
    # Whose it is: the name of the log says it, or the folder that torchrun makes for a rank.
    named = re.search(r"rank[_.-]?(\d{1,7})[^/]*$|(?:^|/)(\d{1,7})/std(?:out|err)\.log$", file.as_posix())
    return read_log(file, log, int(named[1] or named[2]) if named else None)


def files_of(path: str | Path) -> list[Path]:
    """Return the files of a folder by name, or the one file; UsageError when they cannot be listed."""
    path = check_path(path, "hang")
    try:
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    except OSError as error:
        raise UsageError(f"{quoted_path(path)} cannot be read ({error.strerror}); {REMEDY}") from None
    dumps = sum(rank_of(file) is not None for file in files)
    if dumps > MAX_FILES:
        raise UsageError(f"{quoted_path(path)} has {dumps:,} files; at most {MAX_FILES:,} dumps are read")
    return files


def read_dump(file: Path, rank: int) -> Dump:
    """Read the dump of a rank; BadDumpError, which names the file, when it is none."""
    try:
        return dump_of(rank, content_of(file))
    except (BadDumpError, BadPickleError) as error:
        raise BadDumpError(f"{quoted_path(file)} is not a dump of the Flight Recorder: {error}; {REMEDY}") from None


def rank_of(file: Path) -> int | None:
    """Return the rank with which the name of a dump ends: 3 of nccl_trace_rank_3 and of rank3.json; else None."""
    found = re.search(r"(\d{1,7})$", file.stem if file.suffix in (".json", ".pickle", ".pkl") else file.name)
    return int(found[1]) if found else None


def content_of(file: Path) -> Any:
    """Return what a file holds, as plain values; an error for what is neither JSON nor a plain pickle."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadDumpError(f"it cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise BadDumpError(f"it has more than {MAX_BYTES:,} bytes")
    if content[:1] == b"\x80":
        return read_plain_pickle(content)
    try:
        return parse_json(content.decode("utf-8-sig"), any_number=True)
    except ValueError as error:  # also of what is not UTF-8
        raise BadDumpError(f"it is neither a pickle nor JSON ({reason(error)})") from None
