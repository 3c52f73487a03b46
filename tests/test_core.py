"""The core: the files that a reader opens to follow a message of any kind of parallelism. They import only each other.

The lines of each folder only go down. Imports inside functions count, those for type checkers do not.
`python -m tests.test_core` prints what is there.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import minidist

PACKAGE = Path(minidist.__file__).parent
FOLDER = PACKAGE / "core"
LINES = {
    "autograd": 1_597,
    "base": 754,
    "collectives": 492,
    "comm": 825,
    "nn": 1_032,
    "optim": 481,
    "parallel": 1_994,
    "pipeline": 1_132,
    "train": 673,
}
CORE = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in FOLDER.rglob("*.py")
}


def imports(node):
    """Yield the modules that a syntax tree imports, without those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("minidist"):
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                path = PACKAGE.parent / whole.replace(".", "/")
                yield whole if path.is_dir() or path.with_suffix(".py").exists() else child.module
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name.startswith("minidist"))
        else:
            yield from imports(child)


def outside():
    """Return (file, imported) of the imports of the core that are not in the core."""
    trees = ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in FOLDER.rglob("*.py"))
    return sorted({(str(path), name) for path, tree in trees for name in imports(tree) if name not in CORE})


def lines(folder):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (FOLDER / folder).rglob("*.py"))


def test_the_core_imports_nothing_from_outside_it():
    assert outside() == []


def test_the_core_does_not_grow():
    assert {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(LINES)
    assert {folder: lines(folder) for folder, most in LINES.items() if lines(folder) > most} == {}


# A step of ZeRO 3 between two ranks, an all-reduce, and a pipeline of two stages.
PROGRAM = """
import sys
import numpy as np
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.collectives import all_reduce
from minidist.core.comm.sim.world import Sim
from minidist.core.nn import MLP
from minidist.core.optim import AdamW
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters
from minidist.core.pipeline.schedules import get_schedule
from minidist.core.pipeline.runtime import Pipeline, split_model

def sharded(comm):
    model = fully_shard(MLP([4, 6, 3]), mesh=comm)
    optimizer = AdamW(sharded_parameters(model), lr=0.1)
    x = np.random.default_rng(comm.rank).standard_normal((5, 4)).astype(np.float32)
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = cross_entropy(model(Tensor(x)), np.arange(5) % 3)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[2] < losses[0], all_reduce(comm, np.ones(3)).tolist()

def pipelined(comm):
    stages, tied = split_model(MLP([4, 6, 3]), 2, [comm.rank])
    plan = get_schedule("1f1b").plan(2, 4)
    pipe = Pipeline(comm, plan, stages, lambda y, t: cross_entropy(y, t, 20.0), tied=tied)
    losses = pipe.step([np.ones((5, 4), np.float32)] * 4, [np.arange(5) % 3] * 4)
    return len(losses) if losses else 0

print(Sim(2).run(sharded), Sim(2).run(pipelined))
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "minidist"), sep="\\n")
"""


def test_the_core_runs_without_the_rest_of_the_package(tmp_path):
    """Copied alone, with an empty package around it."""
    (tmp_path / "minidist").mkdir()
    (tmp_path / "minidist/__init__.py").touch()
    shutil.copytree(FOLDER, tmp_path / "minidist/core", ignore=shutil.ignore_patterns("__pycache__"))
    ran = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert ran.returncode == 0, ran.stderr
    answer, *files = ran.stdout.splitlines()
    assert answer == "[(True, [2.0, 2.0, 2.0]), (True, [2.0, 2.0, 2.0])] [4, 4]"
    # An editable installation finds a module of the package that the copy does not have.
    assert [file for file in files if not file.startswith(str(tmp_path))] == []
    assert len(files) > 50


if __name__ == "__main__":
    for name in LINES:
        print(f"{name}: {lines(name)} lines")
    print("in all", lines("."), "imports from outside:", outside())
