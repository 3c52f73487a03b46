"""A package that minidist does not require is imported where its absence is a sentence with the remedy."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from minidist import cli
from minidist.base.extras import EXTRAS, extra
from minidist.core.base.errors import UsageError
from tests.cases import each
from tests.sources import statements

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"markdown_it": "markdown-it-py", "cupy": "cupy-cuda13x", "ml_dtypes": "ml_dtypes", "PIL": "pillow"}
# Where an optional package is imported directly, and why it is there then.
DIRECT = {
    "minidist/base/cuda_kernels.py": "arrays of CuPy exist",
    "minidist/base/cuda_products.py": "arrays of CuPy exist",
    "minidist/base/device.py": "says the sentence of --device",
    "minidist/report/bench/": "asked for after has_torch(), and on its ranks",
    "minidist/commands/doctor.py": "asks first",
    "minidist/comm/launched.py": "says the sentence, as a LauncherError",
    "minidist/comm/mpi/staging.py": "arrays of CuPy exist",
    "minidist/parallel/host_pool.py": "arrays of CuPy exist",
    "minidist/planning/transformers_count.py": "says how to go on without it",
    "minidist/debug/torch_ranks/": "imported by `minidist torch`, which asks first",
}


def required(names):
    """The modules of distributions, from lines such as "numpy>=2.1"."""
    return {re.split(r"[><=;\[ ]", line)[0].replace("-", "_") for line in names}


def imported(tree):
    """(module, line) of every import statement of a file, also inside functions."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


def test_only_these_files_import_an_optional_package_directly():
    brought = {"PIL"}  # by matplotlib
    always = sys.stdlib_module_names | required(PROJECT["dependencies"]) | brought | {"minidist", "pyodide"}
    found = set()
    for path in (ROOT / "minidist").rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        for module, line in imported(ast.parse(path.read_text(encoding="utf-8"))):
            if module.partition(".")[0] not in always:
                place = next((place for place in DIRECT if name.startswith(place)), None)
                assert place, f"{name}, line {line}: {module} is optional; take minidist.base.extras.extra"
                found.add(place)
    assert found == DIRECT.keys()


def test_each_package_is_in_the_extra_that_the_sentence_names():
    for package, name in EXTRAS.items():
        distribution = DISTRIBUTIONS.get(package, package).replace("-", "_")
        assert distribution in required(PROJECT["optional-dependencies"][name]), (package, name)


@each("package", EXTRAS)
def test_the_sentence_names_what_needs_it_the_package_and_the_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as error:
        extra(package, "minidist lesson build")
    said = str(error.value)
    assert said.startswith(f"minidist lesson build needs {package} (")
    assert said.endswith(f"; install it with: pip install 'minidist[{EXTRAS[package]}]'")


@pytest.mark.parametrize(
    ("words", "packages"),
    [
        (["lesson", "build", "90"], ["jupytext", "nbclient", "ipykernel"]),
        (["lesson", "build", "90", "--student", "-o", "class"], ["jupytext"]),
        (["lesson", "slides", "90", "-o", "deck.html"], ["jupytext", "nbclient", "ipykernel", "markdown_it"]),
        (["torch", "90_tiny.py"], ["torch"]),
        (["order", "torch.sum"], ["torch"]),
    ],
    ids=" ".join,
)
def test_a_command_without_its_extra_is_one_sentence_and_leaves_nothing(words, packages, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "90_tiny.py").write_text("# %%\nprint(1)\n")
    for package in packages:
        with monkeypatch.context() as missing:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                missing.setitem(sys.modules, name, None)
            missing.setitem(sys.modules, package, None)
            with pytest.raises(SystemExit) as end:
                cli.main(words)
        said = capsys.readouterr().err.splitlines()
        said = [line for line in said if "IPKernelApp" not in line]
        assert end.value.code == 2
        assert len(said) == 1, said
        assert f"needs {package} (" in said[0]
        assert "pip install 'minidist[" in said[0]
        assert not (tmp_path / "class").exists()
        assert not (tmp_path / "deck.html").exists()
