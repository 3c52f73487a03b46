"""Names of a package that are imported when they are used: one module each, and never a module of the same name."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import minidist
from minidist.core.base.lazy import places

PACKAGE = Path(minidist.__file__).parent
LAZY = [path for path in sorted(PACKAGE.rglob("__init__.py")) if "lazy_imports(" in path.read_text(encoding="utf-8")]


def test_every_name_of_a_package_is_there_and_is_no_module():
    assert len(LAZY) > 10
    for path in LAZY:
        package = importlib.import_module(".".join(("minidist", *path.parent.relative_to(PACKAGE).parts)))
        names = places(str(path))
        modules = {part.stem for part in path.parent.iterdir() if part.is_dir() or part.suffix == ".py"}
        assert modules.isdisjoint(names), path
        for name, (module, original) in names.items():
            assert getattr(package, name) is getattr(importlib.import_module(module), original), (path, name)
            assert name in dir(package)
        assert set(names) <= set(package.__all__), path


def test_another_name_is_an_attribute_error_as_of_any_module():
    with pytest.raises(AttributeError, match=r"module 'minidist.nn' has no attribute 'Linearr'"):
        importlib.import_module("minidist.nn").Linearr  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'Linearr' from 'minidist.nn'"):
        exec("from minidist.nn import Linearr")


# What the README's first program of a few lines uses, and nothing for pipelines, MPI, GPUs or files of traces.
PROGRAM = """
import sys
from minidist import SGD, DistributedDataParallel, Linear, SimWorld, Tensor
import numpy as np
def main(comm):
    model = DistributedDataParallel(Linear(4, 2), comm)
    (model(Tensor(np.ones((3, 4), np.float32))) ** 2).mean().backward()
    SGD(model.flat, lr=0.1).step()
SimWorld(2).run(main)
print(*(m for m in sys.modules if m.startswith("minidist")))
"""


def test_a_data_parallel_program_loads_little_else():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    above = ("pipeline", "core.pipeline", "techniques", "job", "planning", "report", "debug", "course", "comm.mpi")
    assert [m for m in loaded if m.startswith(tuple(f"minidist.{name}" for name in above))] == []
    core = ("core.nn.gpt", "core.parallel.fsdp", "core.optim.adam")
    for name in ("base.meta", "base.trace_file", "collectives.auto", "data", *core):
        assert f"minidist.{name}" not in loaded
    lines = sum(
        len(Path(sys.modules[m].__file__ or "").read_text(encoding="utf-8").splitlines())
        for m in loaded
        if importlib.import_module(m).__file__
    )
    assert len(loaded) <= 77
    assert lines <= 9_500


def test_a_simulated_job_loads_nothing_of_mpi(tmp_path):
    program = "import sys; from minidist.cli import main\ntry: main(['train', '--steps', '1', '--dp', '2'])\n"
    program += "finally: print(*(m for m in sys.modules if m.startswith('minidist')))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    loaded = ran.stdout.splitlines()[-1].split()
    assert "minidist.job.train.trainer" in loaded
    assert [m for m in loaded if m.startswith(("minidist.comm.mpi.world", "minidist.debug", "minidist.report"))] == []
