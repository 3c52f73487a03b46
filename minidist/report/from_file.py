"""A trace file and the name of a picture: what `minidist report` does."""

from pathlib import Path

from minidist.base.errors import UsageError, nearest
from minidist.base.trace import read_traces
from minidist.report.draw import KINDS, draw
from minidist.report.frame import save
from minidist.report.perfetto import write_perfetto


def draw_report(path: Path, picture: str, output: Path | None = None) -> Path:
    """Draw `picture` (a name of KINDS, or "perfetto") of the trace file `path`; returns where it is."""
    if not path.is_file():
        raise UsageError(f"there is no trace {str(path)!r}; `minidist train --trace {path}` writes one")
    traces, header = read_traces(path)
    if picture == "perfetto":
        output = output or path.with_suffix(".perfetto.json")
        write_perfetto(output, traces)
        return output
    if picture not in KINDS:
        names = (*KINDS, "perfetto")
        raise UsageError(f"there is no picture {picture!r}{nearest(picture, names)}; there are {', '.join(names)}")
    output = output or path.with_name(f"{path.stem}-{picture}.svg")
    made_by = f"{header['command']}; " if header.get("command") else ""
    command = f"{made_by}minidist report {path} --picture {picture}"
    save(draw(picture, traces, {**header, "command": command}), output)
    return output
