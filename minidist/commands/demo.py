"""`minidist demo`: the first thing to run.

Proved by: tests/test_readme.py
"""

from pathlib import Path
from typing import Annotated

from minidist.commands.command import Option, Result, json_or_table, say
from minidist.commands.flags import Timeout


@json_or_table
def demo(
    steps: Annotated[int, Option(help="optimizer steps")] = 600,
    ranks: Annotated[int, Option(help="ranks in every world")] = 4,
    folder: Annotated[Path, Option(help="where traces and the picture go")] = Path("runs/demo"),
    timeout: Timeout = 60.0,
) -> Result:
    """Train a byte-level GPT on four ranks, simulated and under mpiexec, and compare both with one device."""
    from minidist.commands.demo_run import run_demo
    from minidist.report.from_file import draw_report

    report, lines = run_demo(steps, ranks, folder, timeout, say)
    last = f"{steps - 1}:{steps}"
    report["picture"] = str(draw_report(Path(report["trace"]), "space-time", folder / "space-time.svg", last))

    def show() -> None:
        print("\n".join([*lines, f"picture: {report['picture']}"]), flush=True)
        say(
            "  its last step, a line for each rank and one for its stream: blue is forward, green backward, purple the"
            " messages of one bucket of gradients; the first bucket travels while backward still runs"
        )
        say(f"page of the whole run: minidist report {report['trace']} -o {folder / 'page.html'}")
        if not Path("README.md").exists():
            say("next: minidist lesson copy lessons; minidist example copy mpi_examples; minidist --help")
            return
        say(
            "next: the commands of README.md; `source .venv/bin/activate` makes minidist, python and mpiexec the ones"
            " used here"
        )

    return Result(report, show, 0 if report["passed"] else 1)
