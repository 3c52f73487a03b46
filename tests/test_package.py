"""The package as a whole: what an import must not do."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minidist
from tests.cases import each


def imported_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after `statement`."""
    program = f"import sys; {statement}; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


def test_importing_minidist_imports_neither_mpi_nor_pictures():
    """Importing mpi4py starts MPI, in a process that may be no rank; matplotlib takes half a second."""
    assert not imported_by("import minidist") & {"mpi4py", "matplotlib", "cupy", "torch"}


def test_a_plan_needs_nothing_but_the_ground_floor():
    """Python runs pipeline/__init__.py before pipeline/plan.py, and import-linter does not see that arrow."""
    above = {f"minidist.{name}" for name in ("nn", "comm", "collectives", "parallel", "job")}
    above |= {f"minidist.core.{name}" for name in ("autograd", "nn", "comm", "collectives", "parallel", "train")}
    assert not imported_by("import minidist.pipeline, minidist.core.pipeline") & above


# Of the others, one file per command, exercise, picture and schedule, the first line says how to find them.
LISTED = """
    base collectives comm comm.mpi comm.sim core core.autograd core.autograd.ops core.base core.collectives core.comm
    core.comm.sim core.nn core.optim core.parallel core.pipeline
    core.pipeline.runtime core.train course course.museum data debug debug.dumps job job.checkpoint job.config
    job.equality job.train job.train.strategies nn nn.ops optim parallel parallel.context parallel.tensor pipeline
    pipeline.runtime planning report.bench techniques.compression
"""


@each("name", LISTED.split())
def test_the_help_of_a_package_lists_its_modules(name):
    package = importlib.import_module(f"minidist.{name}")
    parts = [m.name + ("/" if m.ispkg else ".py") for m in pkgutil.iter_modules(package.__path__)]
    assert [part for part in parts if part not in (package.__doc__ or "")] == []
    named = re.findall(r"(?m)^(\w+(?:\.py|/)) ", package.__doc__ or "")
    assert [part for part in named if part not in parts] == []


def test_the_names_of_the_core_come_from_the_package_and_are_loaded_when_they_are_used():
    assert imported_by("import minidist") & {"numpy", "minidist.comm", "typer"} == set()
    assert "minidist.parallel" not in imported_by("from minidist import SimWorld, Tensor, launch")
    for name, module in minidist._PLACES.items():
        assert getattr(minidist, name) is getattr(importlib.import_module(module), name), name
    assert imported_by("from minidist import flight_recorder") & {"numpy", "torch", "typer"} == set()
    assert minidist.flight_recorder.watch is importlib.import_module("minidist.debug.flight_recorder.watchdog").watch
    with pytest.raises(AttributeError, match="module 'minidist' has no attribute 'SimWord'"):
        minidist.SimWord  # noqa: B018


def test_a_star_brings_the_names_of_the_core_and_dir_lists_them_alone():
    names = {}
    exec("from minidist import *", names)
    assert set(names) - {"__builtins__"} == set(minidist.__all__)
    assert {name for name in dir(minidist) if not name.startswith("__")} == set(minidist.__all__)


def test_a_folder_called_minidist_does_not_hide_the_package(tmp_path):
    """A script in the folder that has the clone imports the package, and not the clone's folder."""
    (tmp_path / "minidist").symlink_to(Path(minidist.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import minidist; print(minidist.__file__)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert ran.stdout.strip().endswith("minidist/__init__.py")
