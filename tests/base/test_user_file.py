"""FILE.py:FUNCTION: the function itself, or one sentence that says what is wrong with the file."""

import json
import sys

import pytest

from minidist.base.user_file import is_user_function, load_function
from minidist.core.base.errors import UsageError
from tests.cases import each


def test_a_function_is_found_and_its_file_may_use_dataclasses(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Pair:\n    a: int\ndef f():\n    return Pair(3)\n"
    )
    assert load_function(f"{path}:f")().a == 3
    assert (is_user_function("a.py:f"), is_user_function("ring"), is_user_function("a.csv")) == (True, False, False)


def test_a_file_called_like_a_module_does_not_take_its_place(tmp_path):
    (tmp_path / "json.py").write_text("def f():\n    return 1\n")
    assert load_function(f"{tmp_path / 'json.py'}:f")() == 1
    assert sys.modules["json"] is json


@each(
    ("text", "name", "words"),
    [
        ("def f(): return 1", "g", "has no function 'g'"),
        ("def first(): return 1", "frist", r"has no function 'frist' \(did you mean 'first'\?\)"),
        ("x = 3", "x", "has no function 'x'"),
        ("1 / 0", "f", "cannot be imported: ZeroDivisionError: division by zero; correct the file"),
        ("import sys; sys.exit(3)", "f", "cannot be imported: SystemExit: 3"),
        ("def f(:", "f", "cannot be imported: SyntaxError"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, name, words):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        load_function(f"{path}:{name}")


@pytest.mark.parametrize("source", ["mine.py", "ring"])
def test_what_names_no_function(source):
    with pytest.raises(UsageError, match=rf"^'{source}' names no function; write FILE\.py:FUNCTION$"):
        load_function(source)


@pytest.mark.parametrize("source", ["nowhere.py:f", "a\0b.py:f"])
def test_what_is_no_file(source):
    with pytest.raises(UsageError, match=r"file .* does not exist; write FILE\.py:FUNCTION"):
        load_function(source)
