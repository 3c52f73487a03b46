"""`minidist example`: the programs of mpi_examples, and a copy of them to run and change.

Proved by: tests/test_wheel.py
"""

from pathlib import Path
from typing import Annotated

from minidist.commands.command import Argument, Group, say


def listed() -> None:
    """List the example programs."""
    from minidist.course.lesson.shipped import about, shipped

    for path in shipped("mpi_examples"):
        # With its folder, which says what it is an example of.
        name = "/".join(path.parts[path.parts.index("mpi_examples") + 1 :])
        print(f"{name:46} {about(path)}")
    say("copy them: minidist example copy mpi_examples")


example = Group("Example programs: list them, or copy them.", listed)


@example.command("copy")
def example_copy(folder: Annotated[Path, Argument(help="where the examples go")]) -> None:
    """Copy the example programs to a folder."""
    from minidist.course.lesson.shipped import copy

    say(f"written: {len(copy('mpi_examples', folder))} files in {folder}")
    say(f"the first one: python {folder / 'first_steps.py'} --ranks 4")
