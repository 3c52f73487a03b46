"""A trace file and the name of a picture, or of another tool's format: what `minidist report` does.

Proved by: tests/report/test_page.py
"""

from collections.abc import Callable
from pathlib import Path

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.file_format import format_of
from minidist.base.trace_file import only_steps, read_traces, read_unfinished, steps_of
from minidist.base.traces import Trace
from minidist.report.chakra import write_chakra
from minidist.report.draw import KINDS, Header, draw, incomplete_sentence
from minidist.report.frame import HTML, SUFFIXES, save
from minidist.report.kineto import write_kineto
from minidist.report.page import write_page
from minidist.report.perfetto import write_perfetto

FORMS = ("chakra", "hta")  # of other tools
# Of each picture the endings of its file. A file's ending names the first picture that has it.
ENDINGS: dict[str, tuple[str, ...]] = {"space-time": SUFFIXES, **dict.fromkeys(KINDS, SUFFIXES)}
ENDINGS |= {"perfetto": (".json",), "page": HTML, "steps": (*HTML, ".gif")}
MAX_READABLE = 2000  # messages; a space-time diagram of more is a wall of arrows


def draw_report(
    path: Path,
    picture: str | None = None,
    output: Path | None = None,
    steps: str | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Path:
    """Draw `picture` (a name of KINDS, "perfetto", "page" or "steps") of a trace; returns where it is.

    Without a name it is the page when `output` ends in .html, "perfetto" when it ends in .json, else space-time.

    path: a trace file, or the folder of a job that hung under MPI. steps: "a:b", the steps to draw; by default all, but
    of a space-time diagram with too many messages the last step only. say: called with a sentence when events of the
    run are missing in the trace; the picture says so, too.
    """
    # The picture: the one that is named, or the one that the output's suffix asks for.
    if picture is not None and picture not in ENDINGS:
        raise UsageError(
            f"there is no picture {quoted(picture)}{nearest(picture, ENDINGS)}; there are {', '.join(ENDINGS)}"
        )
    picture = format_of(output, picture, ENDINGS, "space-time", ("--output", "--picture"))

    traces, header = _read(path)
    if header.get("incomplete"):
        say(f"{quoted_path(path, marks=False)}: {incomplete_sentence(header)}; the picture shows what is there")

    # In captions, a byte of the name that is not UTF-8 is a question mark.
    shown = str(path).encode("utf-8", "replace").decode("utf-8")

    # The steps: those asked for, else as many as can be read.
    if steps is None and picture == "space-time":
        steps = _readable_steps(traces)
    if steps is not None:
        traces = only_steps(traces, *_range(steps))

    # Write it next to the trace, unless `output` names another place.
    if picture == "page":
        return write_page(output or path.with_suffix(".html"), traces, header, shown)
    if picture == "steps":
        from minidist.report.stepper import show

        return show(traces, header.get("command") or shown).write(output or path.with_name(f"{path.stem}-steps.html"))
    if picture == "perfetto":
        return write_perfetto(output or path.with_suffix(".perfetto.json"), traces, incomplete_sentence(header))

    # A single picture: its caption says how the run was made, and how this picture was drawn.
    made_by = f"{header['command']}; " if header.get("command") else ""
    part = f" --steps {steps}" if steps else ""
    command = f"{made_by}minidist report {shown} --picture {picture}{part}"
    figure = draw(picture, traces, {**header, "command": command})
    return save(figure, output or path.with_name(f"{path.stem}-{picture}.svg"))


def export_trace(
    path: Path, form: str, folder: Path | None = None, steps: str | None = None, messages: bool = False
) -> Path:
    """Write a trace in the form of another tool, one of FORMS, a file per rank; returns the folder.

    messages: of "chakra", write the messages of collectives instead of the calls.
    """
    if form not in FORMS:
        raise UsageError(f"--format {quoted(form)}{nearest(form, FORMS)}; there are gif, {', '.join(FORMS)}")
    if messages and form != "chakra":
        raise UsageError(f"--messages with --format {form}, which has messages only; leave it out")
    if folder is not None and any(folder.suffix in endings for endings in ENDINGS.values()):
        raise UsageError(
            f"--format {form} contradicts --output {quoted(folder.name)}: it writes a folder, with a file for each"
            " rank; give another name, or leave out --format"
        )
    traces, header = _read(path)
    if steps is not None:
        traces = only_steps(traces, *_range(steps))
    folder = folder or path.with_name(f"{path.stem}-{form}")
    if form == "hta":
        return write_kineto(folder, path.stem, traces, incomplete_sentence(header))
    return write_chakra(folder, path.stem, traces, messages, incomplete_sentence(header))


def _read(path: Path) -> tuple[list[Trace], Header]:
    """Read a trace: of a finished run one file, of a run that hung one file per rank."""
    if path.is_dir():
        return read_unfinished(path)
    if path.is_file():
        return read_traces(path)
    raise UsageError(f"there is no trace {quoted_path(path)}; `minidist train --trace {path}` writes one")


def _readable_steps(traces: list[Trace]) -> str | None:
    """Return the last step when all steps together have too many messages to be read, else None."""
    count = steps_of(traces)
    messages = sum(len(trace.sent()) for trace in traces)
    return f"{count - 1}:{count}" if messages > MAX_READABLE and count > 1 else None


def _range(steps: str) -> tuple[int, int]:
    first, colon, stop = steps.partition(":")
    if not first.isdigit() or (colon and not stop.isdigit()):
        raise UsageError(f"--steps {quoted(steps)}; write a:b for the steps a, a + 1, ..., b - 1, or one number")
    return int(first), int(stop) if colon else int(first) + 1
