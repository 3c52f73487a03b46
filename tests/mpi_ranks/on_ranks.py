"""Runs a function of MPI.COMM_WORLD and MPI, or the text of a program, on simulated ranks that import mpi4py."""

from minidist.debug.mpi_ranks.program import run_on_ranks
from minidist.debug.user_program import UserProgram


class Called(UserProgram):
    """A function in place of a program; it is called with MPI.COMM_WORLD and MPI."""

    def __init__(self, function):
        super().__init__("function.py")
        object.__setattr__(self, "function", function)

    def check(self):
        pass

    def run(self, name="__main__"):
        from mpi4py import MPI

        self.function(MPI.COMM_WORLD, MPI)


def on_ranks(ranks, function, **options):
    """Return the run of a function on every rank."""
    return run_on_ranks(Called(function), ranks, **options)


def program(folder, text, name="program.py"):
    """Return the program of a text."""
    (folder / name).write_text(text)
    return UserProgram(str(folder / name))
