"""Who copies what a lesson shows above an exercise, and changes it in three small places, has no answer to it.

A small edit deletes any part of the copied text, or puts two tokens at most in its place; which name a variable has
does not count. Of an answer of 20 tokens three edits write a third: that is not a copy.
"""

import ast
import builtins
import contextlib
import copy
import inspect
import io
import itertools
import keyword
import re
import textwrap
import tokenize

import nbformat
import numpy as np
import pytest

from minidist.course.lesson import build, names, solution
from minidist.course.lesson.handout import without_solutions
from minidist.course.lesson.numbers import number_of
from tests.cases import each
from tests.lesson.judged_here import judged
from tests.lesson.test_lessons import LESSONS
from tests.lesson.unusual_answers import RIGHT

EDITS, NEW = 3, 2
COPIED = 0.8  # of the tokens of an answer
SPACE = {tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
KNOWN = {*dir(builtins), *keyword.kwlist, "np", "comm"}
PATHS = {number_of(path): path for path in LESSONS}


def cells_above(exercise):
    """The code of the cells above an exercise as students get it, and what these cells print."""
    above = []
    number, _, name = exercise.partition(".")
    for cell in nbformat.read(PATHS[number].with_suffix(".ipynb"), as_version=4).cells:
        if cell.cell_type == "code":
            if "check(" in cell.source and re.search(rf'"({number}\.)?{name}"', cell.source):
                break
            code = without_solutions(cell.source)
            above += [code] if code != cell.source.strip("\n") else [code, build.printed(cell)]
    return above


def tokens_of(text):
    """The tokens of a text of Python, with "name" for each variable; of another text those that can be read."""
    found = [""]
    with contextlib.suppress(SyntaxError):
        text = ast.unparse(ast.parse(textwrap.dedent(text)))
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in SPACE:
                is_variable = token.type == tokenize.NAME and found[-1] != "." and token.string not in KNOWN
                found.append("name" if is_variable else token.string)
    except (tokenize.TokenError, IndentationError):
        pass
    return found[1:]


def body_of(function):
    """The statements of a function as text, without its docstring and annotations."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    return "\n".join(map(ast.unparse, tree.body[1:] if ast.get_docstring(tree) else tree.body))


def edits(source, target):
    """How many small edits make `target` of a part of `source`."""
    source, rows = np.array(source), [np.zeros(len(source) + 1, int)]
    for j, token in enumerate(target, 1):
        row = np.minimum.reduce([np.minimum.accumulate(rows[j - b]) + 1 for b in range(1, NEW + 1) if j >= b])
        row[1:] = np.where(source == token, np.minimum(row[1:], rows[j - 1][:-1]), row[1:])
        rows.append(np.minimum(row, np.minimum.accumulate(row) + 1))
    return int(rows[-1].min())


def is_a_copy(source, answer):
    target = tokens_of(body_of(answer))
    return (1 - COPIED) * len(target) >= EDITS * NEW and edits(source, target) <= EDITS


@each("exercise", names(), sampled=8)
def test_no_right_answer_is_a_copy_of_what_stands_above_its_exercise(exercise):
    source = [token for text in cells_above(exercise) for token in tokens_of(text)]
    answers = [solution(exercise), *(function for name, function in RIGHT if name == exercise)]
    assert [answer.__name__ for answer in answers if is_a_copy(source, answer)] == []


def test_a_copy_is_recognised():
    def answer(comm, array):
        for step in range(comm.size - 1):
            comm.sendrecv(array[step], (comm.rank + 1) % comm.size, array[step - 1], (comm.rank - 1) % comm.size)
        return array

    shown = body_of(answer).replace("size - 1", "size - 2").replace("step", "turn").replace("rank - 1", "rank - 2")
    above = "x = 1\n" + shown.replace("return", "print(x)\nreturn")
    assert edits(tokens_of(above), tokens_of(body_of(answer))) == EDITS
    assert is_a_copy(tokens_of(above), answer)
    assert not is_a_copy(tokens_of(above.replace("+ 1", "+ 2")), answer)


def functions_above(exercise):
    """The functions in the cells above that take as many arguments as an answer, and the names that they know."""
    known, found = {}, []
    for text in cells_above(exercise):
        try:
            statements = ast.parse(text).body
        except SyntaxError:  # what a cell prints, and is no code
            continue
        for statement in statements:
            # The cells do not run: a default or a decorator may need what they compute.
            with contextlib.suppress(NameError):
                if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef):
                    exec(compile(ast.Module([statement], []), "cell", "exec"), known)
            found += [node for node in ast.walk(statement) if isinstance(node, ast.FunctionDef)]
    count = len(inspect.signature(solution(exercise)).parameters)
    return [function for function in found if len(function.args.args) == count], known


@pytest.mark.exhaustive
@pytest.mark.parametrize("exercise", names())
def test_a_function_from_above_with_other_numbers_is_refused(exercise):
    functions, known = functions_above(exercise)
    for function in functions:
        numbers = [i for i, node in enumerate(ast.walk(function)) if type(getattr(node, "value", None)) is int]
        for count in range(EDITS + 1):
            for places in itertools.combinations(numbers[:12], count):
                for signs in itertools.product((-1, 1), repeat=count):
                    edited = copy.deepcopy(function)
                    nodes = list(ast.walk(edited))
                    for place, sign in zip(places, signs, strict=True):
                        nodes[place].value += sign
                    exec(compile(ast.Module([edited], []), "cell", "exec"), scope := dict(known))
                    assert not judged(exercise, scope[function.name]).passed, ast.unparse(edited)
