"""How the source reads: each module names the tests that prove it, and the way from a gradient to the wire is short."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import minidist
from minidist import cli
from minidist.comm import SimWorld
from minidist.commands import runner
from minidist.core.autograd import Tensor, cross_entropy
from minidist.core.base.trace import PURPOSES
from minidist.core.comm.sim.world import Sim
from minidist.core.nn import MLP
from minidist.core.parallel.data_parallel import DistributedDataParallel
from minidist.core.parallel.fsdp import fully_shard, states_of, units_of
from minidist.core.pipeline.runtime import Pipeline, split_model
from minidist.course.lesson.catalogue import exercises_of
from minidist.pipeline.schedules import get_schedule
from tests.sources import statements

ROOT = Path(__file__).parents[1]
PACKAGE = Path(minidist.__file__).parent
EXERCISES = ("exercises", "assignments", "puzzles")  # folders whose files have nothing but exercises
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))


@cache
def tree_of(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def proofs(path):
    """The test files that a module's docstring names, or None when its last paragraph is not `Proved by: ...`.

    A file of exercises has the tests of its package, which run every exercise.
    """
    files = (path, path.with_name("__init__.py")) if path.parent.name in EXERCISES else (path,)
    for file in files:
        docstring = ast.get_docstring(tree_of(file)) or ""
        if found := re.search(r"(?:^|\n)Proved by:\s+([^\n].*)\Z", docstring, flags=re.S):
            return [name.strip() for name in re.split(r"[,\s]+", found[1].strip()) if name.strip()]
    return None


def test_every_file_of_exercises_has_one():
    """Otherwise the tests of its package, which take the exercises of all files, would prove nothing of it."""
    files = [path for path in MODULES if path.parent.name in EXERCISES]
    modules = [".".join(("minidist", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in files]
    assert len(modules) > 40
    assert [module for module in modules if not exercises_of(module)] == []


def test_every_module_ends_its_docstring_with_the_tests_that_prove_it():
    without = [path.relative_to(ROOT).as_posix() for path in MODULES if not proofs(path)]
    assert without == []


def test_the_tests_that_modules_name_exist():
    wrong = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in MODULES
        for name in proofs(path) or ()
        if not name.startswith("tests/") or not (ROOT / name).exists()
    ]
    assert wrong == []


# These show an exception's whole text on purpose: to the author of a lesson, a submission or a museum's exhibit.
WHOLE_TEXTS = ("course/lesson/build.py", "course/lesson/answer_process.py", "course/museum/exhibit.py")


def test_no_sentence_has_the_whole_text_of_another_programs_error():
    """It may have any length and any number of lines; `base.errors.reason` gives a part of it."""
    trees = {path.relative_to(PACKAGE).as_posix(): tree_of(path) for path in MODULES}
    ours = {node.name for tree in trees.values() for node in statements(tree) if isinstance(node, ast.ClassDef)}
    found = []
    for name, tree in trees.items():
        for handler in statements(tree):
            if not isinstance(handler, ast.ExceptHandler) or handler.name is None or name in WHOLE_TEXTS:
                continue
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if all(ast.unparse(kind).rpartition(".")[2] in ours for kind in kinds):
                continue
            for node in ast.walk(handler):
                value = node.value if isinstance(node, ast.FormattedValue) else None
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("str", "text_of") and node.args:
                    value = node.args[0]
                if isinstance(value, ast.Name) and value.id == handler.name:
                    found.append(f"{name}:{node.lineno}")
    assert found == []


def test_a_module_that_sends_with_a_purpose_knows_it_when_it_is_imported_alone():
    of_core = set(PURPOSES[: PURPOSES.index("user") + 1])  # the others are made outside the core
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        used = set(re.findall(r'\bpurpose\(\s*"(\w+)"', text)) - of_core
        if used - set(re.findall(r'new_purpose\("(\w+)"', text)):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            program = f"import {name}; from minidist.core.base.trace import PURPOSES; print(*PURPOSES)"
            ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            assert used <= set(ran.stdout.split()), name


class Entered:
    """Counts the functions of the package that are entered inside the block, and the files of the core among theirs.

    What watches a world or a module from outside the core is not on the way of a reader who looks for what is sent.
    """

    def __enter__(self):
        self.functions = set()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _event(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self.functions.add((code.co_filename, code.co_qualname))

    def counts(self):
        return len(self.functions), len({file for file, _ in self.functions})


@pytest.fixture(autouse=True)
def without_asyncio(monkeypatch):
    """A program that has imported asyncio, as other tests have, also switches event loops with the ranks."""
    monkeypatch.delitem(sys.modules, "asyncio", raising=False)


WATCHING = 27, 8  # functions and files: what compares, records and watches the messages


def enters_at_most(main, functions, files):
    """Assert how much of the package two ranks enter between them: of the core alone, and with what watches it."""
    for world, more in ((Sim(2), (0, 0)), (SimWorld(2), WATCHING)):
        world.run(main)  # what is looked up once, and known from then on, is not counted
        both = Entered()
        both.functions = set().union(*(entered.functions for entered in world.run(main)))
        found = both.counts()
        assert found[0] <= functions + more[0], (world, found)
        assert found[1] <= files + more[1], (world, found)


def test_a_gradient_of_data_parallelism_enters_few_functions_on_its_way_to_the_wire():
    def main(comm):
        model = DistributedDataParallel(MLP([8, 16, 4]), comm)
        rows = np.random.default_rng(comm.rank).standard_normal((6, 8)).astype(np.float32)
        loss = cross_entropy(model(Tensor(rows)), np.arange(6) % 4)
        comm.barrier()
        with Entered() as entered:
            loss.backward()
        return entered

    enters_at_most(main, 64, 17)


def test_a_gather_of_zero_3_enters_few_functions_on_its_way_to_the_wire():
    def main(comm):
        model = fully_shard(MLP([8, 16, 4]), mesh=comm)
        (unit,) = units_of(model)
        (state,) = states_of(model)
        comm.barrier()
        with Entered() as entered:
            unit.start_gather(state)
            unit.finish_gather()
        return entered

    enters_at_most(main, 33, 15)


def test_a_step_of_1f1b_enters_few_functions():
    def main(comm):
        stages, tied = split_model(MLP([8, 16, 4]), 2, [comm.rank])
        pipeline = Pipeline(
            comm, get_schedule("1f1b").plan(2, 4), stages, lambda y, t: cross_entropy(y, t, 24.0), tied=tied
        )
        rng = np.random.default_rng(0)
        inputs = [rng.standard_normal((6, 8)).astype(np.float32) for _ in range(4)]
        targets = [np.arange(6) % 4] * 4
        pipeline.step(inputs, targets)  # the first step also exchanges shapes
        comm.barrier()
        with Entered() as entered:
            pipeline.step(inputs, targets)
        return entered

    enters_at_most(main, 80, 22)


class UntilProduct(Entered):
    """Counts until the first product of the job."""

    def _event(self, frame, event, argument):
        code = frame.f_code
        if code.co_name == "linear" and code.co_filename.endswith("core/autograd/ops/linear.py"):
            sys.setprofile(None)
        super()._event(frame, event, argument)


def test_a_command_enters_few_functions_before_the_first_product(monkeypatch, minidist):
    words = ["train", "--tp", "2", "--steps", "1", "--data", "markov", "--layers", "1", "--trace", "none", "--json"]
    found, train = [], runner.train

    # A rank has a separate stack, in which nothing is counted unless it is said there.
    def counted(*arguments):
        with UntilProduct() as entered:
            found.append(entered)
            return train(*arguments)

    monkeypatch.setattr(runner, "train", counted)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # as `make test` does; other variables are not read then
    minidist(*words)
    found.clear()
    with UntilProduct() as command, pytest.raises(SystemExit):
        cli.main(words)

    assert len(found) == 2
    assert "ColumnParallelLinear.forward" in {name for entered in found for _, name in entered.functions}
    command.functions.update(*(entered.functions for entered in found))
    functions, files = command.counts()
    assert (functions <= 418, files <= 85) == (True, True), (functions, files)
