"""The size of the source is a budget: what grows here has to make room elsewhere, and a limit only ever goes down.

A technique is a folder of `minidist/techniques`; what all techniques share does not grow with them.
"""

import ast
import re
from functools import cache
from pathlib import Path

import minidist
from minidist.job.config.train_config import JobSettings
from tests.sources import statements

PACKAGE = Path(minidist.__file__).parent

# Lines of each folder, docstrings included.
LINES = {
    "base": 4_248,
    "collectives": 3_991,
    "comm": 6_739,
    "commands": 5_463,
    "course": 13_235,
    "core": 8_996,
    "data": 1_627,
    "debug": 9_624,
    "job": 8_484,
    "nn": 3_738,
    "optim": 1_635,
    "parallel": 5_061,
    "pipeline": 4_860,
    "planning": 5_752,
    "report": 6_740,
    "techniques": 11_716,
}
FOLDERS = 16
SETTINGS = 40  # of every job; those of a technique are in its folder
LOOP = 15  # lines of `Loop.train`, which is the loop
PARAMETERS = 0  # functions with more than eight parameters
LONGEST = 60  # lines of a function
COMPLEX = 21  # functions of a complexity above 15


def sources(folder):
    return sorted((PACKAGE / folder).rglob("*.py"))


def lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def functions():
    """Return (file, function) of all functions and methods. No expression has one."""
    return [
        (str(path.relative_to(PACKAGE)), node)
        for path in PACKAGE.rglob("*.py")
        for node in statements(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(function):
    """Return the number of parameters that a caller may give."""
    taken = function.args
    return len([p for p in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs) if p.arg not in ("self", "cls")])


def complexity(function):
    """Return McCabe's number as radon counts it: 1, and 1 for each way that may be taken. Inner functions are apart."""
    number, nodes = 1, list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes += ast.iter_child_nodes(node)
        match node:
            case ast.If() | ast.IfExp() | ast.Assert():
                number += 1
            case ast.For(orelse=other) | ast.AsyncFor(orelse=other) | ast.While(orelse=other):
                number += 1 + bool(other)
            case ast.BoolOp(values=values):
                number += len(values) - 1
            case ast.comprehension(ifs=ifs):
                number += 1 + len(ifs)
            case ast.Try(handlers=handlers, orelse=other):
                number += len(handlers) + bool(other)
    return number


def test_no_folder_is_larger_than_its_budget():
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert found == set(LINES)
    assert len(found) <= FOLDERS
    sizes = {folder: sum(map(lines, sources(folder))) for folder in LINES}
    assert {folder: size for folder, size in sizes.items() if size > LINES[folder]} == {}


def test_a_technique_s_settings_are_not_those_of_every_job():
    assert len(JobSettings.model_fields) <= SETTINGS


def test_functions_are_short_and_take_few_parameters():
    # Of a command the parameters are its flags.
    wide = [(file, f.name) for file, f in functions() if parameters(f) > 8 and not file.startswith("commands/")]
    assert len(wide) <= PARAMETERS, wide
    length = {(file, f.name): f.end_lineno - f.lineno + 1 for file, f in functions()}
    assert length["core/train/parallelize.py", "train"] <= LOOP
    assert {place: count for place, count in length.items() if count > LONGEST} == {}
    several_ways = [(file, f.name, ways) for file, f in functions() if (ways := complexity(f)) > 15]
    assert len(several_ways) <= COMPLEX, several_ways


def test_a_version_has_at_most_sixty_lines_in_the_changelog():
    text = (PACKAGE.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.split(r"^## ", text, flags=re.M)[1:]
    assert len(versions) >= 2
    assert {version.split("\n")[0]: version.count("\n") for version in versions if version.count("\n") > 60} == {}
