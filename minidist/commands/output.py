"""How a command prints: one JSON object for programs, or a table for people; and its help.

Standard output is for results. Progress, and tables that accompany a file, go to standard error, so that
`minidist ... --json` can be piped.

Proved by: tests/commands/test_cli.py, tests/commands/test_flags.py
"""

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from minidist.base.files import strict

Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]


class PlainFlags:
    """A command whose help shows no type for a flag that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with --help."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_bool_flag", False):
                parameter.metavar = ""
        return parameters


class Command(PlainFlags, TyperCommand):
    """One command."""


class Commands(PlainFlags, TyperGroup):
    """A command that has others."""


class App(typer.Typer):
    """A command that has others, all with the help of `PlainFlags`."""

    def __init__(self, *, cls: type[TyperGroup] = Commands, rich_markup_mode: Any = None, **settings: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=rich_markup_mode, **settings)

    def command(  # type: ignore[override]  # its other settings are those of typer's
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that makes a function a command."""
        return super().command(name, cls=cls, **settings)


@dataclass(frozen=True)
class Result:
    """What a command returns: `value` is what --json prints, `show` prints the same for people."""

    value: Any
    show: Callable[[], None]
    exit_code: int = 0


def json_or_table(function: Callable[..., Result | None]) -> Callable[..., None]:
    """Give a command the flag `--json` and print its Result; None, on ranks that do not print, prints nothing."""
    signature = inspect.signature(function)

    def command(*, json_output: bool, **values: Any) -> None:
        result = function(**values)
        if result is None:
            return
        # Standard output gets one object, or what people read; never both.
        if json_output:
            print(json.dumps(strict(result.value), allow_nan=False))
        else:
            result.show()
        if result.exit_code:
            raise typer.Exit(result.exit_code)

    # The command's flags are those of the function, and --json.
    flag = inspect.Parameter("json_output", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in signature.parameters.values()]
    return with_parameters(command, function, [*own, flag])


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command a flag for each field of the dataclasses that its parameters have as types.

    A field has the annotation and the default of a flag; the command gets the dataclass, made from what was typed.
    """
    groups: dict[str, Any] = {}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = parameter.annotation
        for one in fields(parameter.annotation):
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(one.name, keyword, default=default, annotation=one.type))

    def command(**values: Any) -> Any:
        for name, kind in groups.items():
            values[name] = kind(**{one.name: values.pop(one.name) for one in fields(kind)})
        return function(**values)

    return with_parameters(command, function, parameters)


def with_parameters(
    command: Callable[..., None], function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Return `command` with the name and the help text of `function`, and with `parameters` as its flags."""
    # Typer reads the flags from the signature, and the help from the docstring.
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def with_flags_of(words: Sequence[str], function: Callable[..., None]) -> Callable[..., None]:
    """Return a command without the settings of a job that no word names: Typer needs longer for them than a small job.

    A command that has none of them, or not every flag among the words (so that its help or an error lists all flags),
    is returned as it is.
    """
    # A flag is called as its option says, and else as its parameter.
    flags: dict[str, set[str]] = {}
    for parameter in inspect.signature(function).parameters.values():
        option = next(iter(getattr(parameter.annotation, "__metadata__", ())), None)
        flags[parameter.name] = set(getattr(option, "param_decls", None) or ("--" + parameter.name.replace("_", "-"),))
    typed = {word.partition("=")[0] for word in words if word.startswith("-")}
    settings = getattr(function, "settings", ())
    if not settings or not typed <= set().union(*flags.values()):
        return function

    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in settings or flags[parameter.name] & typed
    ]
    return with_parameters(lambda **values: function(**values), function, parameters)


def say(text: str = "") -> None:
    """Print a line for people on standard error."""
    print(text, file=sys.stderr, flush=True)
