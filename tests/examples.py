"""The fixture `example` runs a program of mpi_examples/, for tests that run it in both worlds."""

import io
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def path_of(name):
    """Return the file of an example."""
    (path,) = (ROOT / "mpi_examples").rglob(f"{name}.py")
    return path


def in_both_worlds(ranks, always=True):
    """Run a test with world="simulated", and in `ranks` ranks with world="mpi"; unless always, in `make exhaustive`."""
    marks = [pytest.mark.mpi(ranks), *([] if always else [pytest.mark.exhaustive])]
    return pytest.mark.parametrize("world", ["simulated", pytest.param("mpi", marks=marks)])


class Copied(io.StringIO):
    """Text that standard error gets, too, for the report on a job that MPI has ended."""

    def write(self, text):
        sys.__stderr__.write(text)
        return super().write(text)


@pytest.fixture
def example(capfd, monkeypatch):
    """example(world, ranks, name, *flags, code=0) -> output of an example, which ends with this exit code.

    Under MPI it is that of rank after rank. world="simulated" is possible there, too: each rank runs all virtual ones.
    """

    from minidist.comm.launched import launched_size

    def example(world, ranks, name, *flags, code=0):
        found, output = ended(world, ranks, name, *flags)
        assert found == code, output
        return output

    def ended(world, ranks, name, *flags):
        program = str(path_of(name))
        code, text = 0, Copied() if world == "mpi" else io.StringIO()
        with monkeypatch.context() as patch, capfd.disabled(), redirect_stdout(text), redirect_stderr(text):
            if world == "simulated":
                for variable in [variable for variable in os.environ if variable.startswith(("PMI_", "OMPI_"))]:
                    patch.delenv(variable)
            assert launched_size() == (ranks if world == "mpi" else None)
            patch.setattr(sys, "argv", [program, *flags, *(["--ranks", str(ranks)] if world == "simulated" else [])])
            try:
                runpy.run_path(program, run_name="__main__")
            except SystemExit as end:
                code = end.code or 0
        if world == "simulated":
            return code, text.getvalue()
        from mpi4py import MPI

        ends = MPI.COMM_WORLD.allgather((code, text.getvalue()))
        return max(code for code, _ in ends), "".join(text for _, text in ends)

    return example
