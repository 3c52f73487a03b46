"""A command is a function whose parameters are its flags; this file reads the words of a command line as its arguments.

    def data(step: Annotated[int, Option(help="print this step")] = 0, ...) -> Result: ...

    words   --step 3 --dp=2
    {"step": 3, "dp": 2, ...}     arguments_of(data, words)

Standard output is for the Result of a command: one JSON object for programs, or what people read. Progress, and tables
that accompany a file, go to standard error, so that `minidist ... --json` can be piped.

A command line that is right is read here. Help, and the sentence about one that is wrong, are Typer's
(`typer_help.py`), which takes longer to import than a small job takes to run.

Proved by: tests/commands/test_command.py, tests/commands/test_cli.py
"""

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from minidist.base.errors import UsageError, quoted
from minidist.base.files import strict
from minidist.base.limits import MAX_DIGITS


class Exit(Exception):
    """Ends the program with this exit code; what is to be said has been said."""

    def __init__(self, exit_code: int = 0) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Option:
    """What `Annotated` says of a parameter that is a flag.

    names: such as --output and -o, or --tied/--untied; none: as the parameter. callback: returns the value that the
    command gets, from the flag and its value, or raises UsageError. min, max: of a whole number. metavar: the place of
    a value in the help. panel: its heading in the help.
    """

    is_word = False

    def __init__(
        self,
        *names: str,
        help: str = "",
        callback: Callable[[str, Any], Any] | None = None,
        min: int | None = None,
        max: int | None = None,
        metavar: str | None = None,
        panel: str | None = None,
    ) -> None:
        self.names, self.help, self.callback = names, help, callback
        self.min, self.max, self.metavar, self.panel = min, max, metavar, panel


class Argument(Option):
    """What `Annotated` says of a parameter whose value has no flag before it."""

    is_word = True


class Group:
    """A command that has others. alone: what it does without one of them; None: it prints its help."""

    def __init__(self, help: str, alone: Callable[[], None] | None = None) -> None:
        self.help, self.alone = help, alone
        self.commands: dict[str, Callable[..., None]] = {}

    def command(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a function as the command `name`."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.commands[name] = function
            return function

        return add


# --- what a command prints --------------------------------------------------------------------------------------------


Json = Annotated[bool, Option("--json", help="one JSON object on standard output")]


@dataclass(frozen=True)
class Result:
    """What a command returns: `value` is what --json prints, `show` prints the same for people."""

    value: Any
    show: Callable[[], None]
    exit_code: int = 0


def json_or_table(function: Callable[..., Result | None]) -> Callable[..., None]:
    """Give a command the flag `--json` and print its Result; None, on ranks that do not print, prints nothing.

    A parameter whose type is a dataclass becomes a flag for each field, with the type and the default of the field; the
    function gets the dataclass of the values that were typed. A function with a parameter `json_output` prints by
    itself.
    """
    groups: dict[str, Any] = {}
    parameters = []
    for given in inspect.signature(function).parameters.values():
        if is_dataclass(given.annotation):
            groups[given.name] = given.annotation
            parameters += [parameter(one.name, one.type, one.default) for one in fields(given.annotation)]
        else:
            parameters.append(given)
    prints = any(one.name == "json_output" for one in parameters)
    if not prints:
        parameters.append(parameter("json_output", Json, False))

    def command(**values: Any) -> None:
        json_output = not prints and values.pop("json_output")
        for name, kind in groups.items():
            values[name] = kind(**{one.name: values.pop(one.name) for one in fields(kind)})
        result = function(**values)
        if result is None:
            return
        # Standard output gets one object, or what people read; never both.
        if json_output:
            print(json.dumps(strict(result.value), allow_nan=False))
        else:
            result.show()
        if result.exit_code:
            raise Exit(result.exit_code)

    return with_parameters(command, function, parameters)


def say(text: str = "") -> None:
    """Print a line for people on standard error."""
    print(text, file=sys.stderr, flush=True)


def command_line() -> str:
    """Return this command as a person would type it."""
    return "minidist " + shlex.join(sys.argv[1:])


# --- the parameters of a function -------------------------------------------------------------------------------------


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a parameter of a command, which has a default."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_parameters(
    command: Callable[..., None], function: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Return `command` with the name and the help text of `function`, and with `parameters` as its flags."""
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    # The flags are read from the signature, and the help from the docstring.
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command. flag: None for the list of the words that the command does not know.

    kind: of one value: str, int, float, bool or Path. several: whether it is a list of them. on, off: the names with
    which a value begins, or a bool is True, and those with which a bool is False.
    """

    name: str
    flag: Option | None
    kind: Any
    several: bool
    default: Any
    on: list[str]
    off: list[str]


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a command."""
    parameters = []
    for one in inspect.signature(function).parameters.values():
        kind, flag = one.annotation, None
        if get_origin(kind) is Annotated:
            kind, flag = get_args(kind)
        # A type that is not None, or a list of it.
        if get_origin(kind) in (Union, UnionType):
            kind = get_args(kind)[0]
        several = get_origin(kind) is list
        if several:
            (kind,) = get_args(kind)
        word, on, off = one.name.replace("_", "-"), [], []
        names = () if flag is None or flag.is_word else flag.names
        if flag is not None and not flag.is_word and not names:
            names = (f"--{word}/--no-{word}",) if kind is bool else (f"--{word}",)
        for name in names:
            positive, _, negative = name.partition("/")
            on.append(positive)
            if negative:
                off.append(negative)
        parameters.append(Parameter(one.name, flag, kind, several, one.default, on, off))
    return parameters


# --- the words of a command line --------------------------------------------------------------------------------------


def arguments_of(function: Callable[..., Any], words: Sequence[str], first_ends: bool = False) -> dict[str, Any] | None:
    """Return the arguments of a command that is called with these words; None where that is not certain.

    first_ends: whether all that follows the first word without a flag belongs to a script. UsageError: of a callback.
    """
    parameters = parameters_of(function)
    found = _texts(parameters, words, first_ends)
    if found is None:
        return None
    given, others = found
    for one in parameters:
        if (one.flag is None or one.flag.is_word) and others:
            taken = len(others) if one.several else 1
            given[one.name] = others[:taken]
            del others[:taken]
    return None if others else _values(parameters, given)


def check_words(function: Callable[..., Any], words: Sequence[str], first_ends: bool = False) -> None:
    """Raise UsageError where `arguments_of` returned None for a word too many, or for the text of a number.

    Typer's sentence about them has neither the value nor a remedy.
    """
    parameters = parameters_of(function)
    given, others = _texts(parameters, words, first_ends) or ({}, [])
    taken = [one for one in parameters if one.flag is None or one.flag.is_word]
    if len(others) > len(taken) and not any(one.several for one in taken):
        raise UsageError(_too_many(others[len(taken)], words, parameters))
    for one in parameters:
        for text in given.get(one.name, ()):
            if not isinstance(text, bool):
                _check_number(one, text)


def _too_many(word: str, words: Sequence[str], parameters: Sequence[Parameter]) -> str:
    """Return what is wrong with a word that no parameter takes: most often it follows a flag that takes no value."""
    before = {first for first, second in pairwise(words) if second == word}
    for one in parameters:
        for flag in before.intersection((*one.on, *one.off)) if one.flag is not None and one.kind is bool else ():
            assert one.flag is not None
            return f"{flag} takes no value, and {quoted(word)} follows it; what it does: {one.flag.help}"
    model = any("--model" in one.on for one in parameters) and not word[:1].isdigit()
    return (
        f"{quoted(word)} has no flag before it; write the flag whose value it is{f', such as --model {word}' * model}"
        " (--help lists all flags)"
    )


def _texts(
    parameters: Sequence[Parameter], words: Sequence[str], first_ends: bool
) -> tuple[dict[str, list[Any]], list[str]] | None:
    """Return the texts behind each flag, True or False for a bool, and the words without a flag."""
    flags: dict[str, Parameter | None] = {}
    takes_unknown = False
    for one in parameters:
        flags.update(dict.fromkeys((*one.on, *one.off), one))
        takes_unknown = takes_unknown or one.flag is None
    given: dict[str, list[Any]] = {}
    others: list[str] = []
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        parameter = flags.get(word.partition("=")[0] if word[:2] == "--" else word)
        ends = first_ends and others
        if ends or word[:1] != "-":
            others.append(word)
        elif parameter is not None:
            value = _text(parameter, word, rest)
            if value is None:
                return None
            given.setdefault(parameter.name, []).append(value)
        elif takes_unknown and others and word not in ("--", "--help", "-h"):
            others.append(word)
        else:
            return None
    return given, others


def _text(parameter: Parameter, word: str, rest: list[str]) -> str | bool | None:
    """Return what a flag's word gives, alone or with the next one, the last of `rest`; None for neither."""
    name, equals, text = word.partition("=")
    if parameter.kind is bool:
        return None if equals else name in parameter.on
    if equals:
        return text
    return rest.pop() if rest and rest[-1][:1] != "-" else None


def _values(parameters: Sequence[Parameter], given: Mapping[str, Sequence[Any]]) -> dict[str, Any] | None:
    """Return the arguments from the texts that are given; None when one is missing, or is not certainly right."""
    values: dict[str, Any] = {}
    for one in parameters:
        if one.name not in given:
            missing = one.default is inspect.Parameter.empty
            if missing and one.flag is not None:
                return None
            values[one.name] = [] if missing else one.default
            continue
        read = []
        for text in given[one.name]:
            read.append(text if isinstance(text, bool) else _read(one, text))
        if None in read:
            return None
        values[one.name] = read if one.several else read[-1]
        if one.flag is not None and one.flag.callback is not None:
            values[one.name] = one.flag.callback(one.on[0], values[one.name])
    return values


def _check_number(parameter: Parameter, text: str) -> None:
    """Raise UsageError for the text of a number that is none, such as 4K or, where it must be whole, 1e3."""
    if parameter.kind is int and not re.fullmatch(r"[+-]?[0-9_]+(\.0*)?", text.strip()):
        raise UsageError(
            f"{parameter.on[0]} {quoted(text)}; it must be a whole number in digits, such as 4096, without a suffix or"
            " an exponent"
        )
    if parameter.kind is float:
        try:
            float(text)
        except ValueError:
            raise UsageError(
                f"{parameter.on[0]} {quoted(text)}; it must be a number, such as 0.5 or 2e12, without a suffix"
            ) from None


def _read(parameter: Parameter, text: str) -> Any:
    """Return the value that a text writes; None for a text that Typer may read in another way, or refuse."""
    if parameter.kind is str:
        return text
    if parameter.kind is Path and text:
        return Path(text)
    if parameter.kind is float and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", text):
        return float(text)
    if parameter.kind is int and re.fullmatch(rf"-?[0-9]{{1,{MAX_DIGITS}}}", text):
        number, flag = int(text), parameter.flag
        assert flag is not None
        if (flag.min is None or number >= flag.min) and (flag.max is None or number <= flag.max):
            return number
    return None
