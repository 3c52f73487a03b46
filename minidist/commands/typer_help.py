"""Typer, for what a command line that is right does not need: help, and the sentence about one that is wrong.

Proved by: tests/commands/test_command.py, tests/commands/test_flags.py
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from minidist.commands.command import Group, Option, parameters_of, with_parameters

Found = list[tuple[Callable[..., Any], dict[str, Any]]]


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


def read(words: Sequence[str], commands: Mapping[str, Any], about: str, settings: Mapping[str, Any]) -> Found | int:
    """Return the command that Typer finds in a command line, with its arguments; the exit code after help.

    commands: by name a function, a Group, or the first line of what is not loaded. about: the help of all. settings:
    how the words of a command are read. Raises an exception of click's, with a method `show`, for a wrong command line.
    """
    # Rich and Typer accept digits that int() refuses, such as a superscript.
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        if not os.environ.get(name, "0").isdecimal():
            del os.environ[name]
    found: Found = []
    app = typer.Typer(
        cls=Commands,
        context_settings={"help_option_names": ["--help", "-h"]},
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        help=about,
    )
    app.callback(invoke_without_command=True)(_root)
    for name, command in commands.items():
        if isinstance(command, Group):
            app.add_typer(_group(command, found), name=name)
        else:
            function = _listed(command) if isinstance(command, str) else _noting(command, found)
            app.command(name, cls=Command, context_settings=settings.get(name))(function)
    code = typer.main.get_command(app)(list(words), prog_name="minidist", standalone_mode=False)
    return found or (code if isinstance(code, int) else 0)


def _root(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    """Take the flags of the program itself; --version is printed without Typer."""


def _listed(text: str) -> Callable[[], None]:
    """Return what stands for a command whose help alone is printed, in the list of all."""

    def command() -> None:
        pass

    command.__doc__ = text
    return command


def _group(group: Group, found: Found) -> typer.Typer:
    alone = group.alone
    app = typer.Typer(
        cls=Commands, help=group.help, no_args_is_help=alone is None, invoke_without_command=alone is not None
    )
    if alone is not None:

        def without_command(context: typer.Context) -> None:
            if context.invoked_subcommand is None:
                found.append((alone, {}))

        app.callback()(without_command)
    for name, function in group.commands.items():
        app.command(name, cls=Command)(_noting(function, found))
    return app


def _noting(function: Callable[..., Any], found: Found) -> Callable[..., None]:
    """Return a command with Typer's flags, which adds the function and its arguments to `found`."""

    parameters, unknown = [], [one.name for one in parameters_of(function) if one.flag is None]

    def command(**values: Any) -> None:
        found.append((function, values | {name: values[name].args for name in unknown}))

    for one, given in zip(parameters_of(function), inspect.signature(function).parameters.values(), strict=True):
        annotation: Any = typer.Context
        if one.flag is not None:
            annotation = Annotated[get_args(given.annotation)[0], _info(one.flag, (one.on or ("",))[0])]
        parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))
    return with_parameters(command, function, parameters)


def _info(flag: Option, name: str) -> Any:
    """Return what Typer is told of a flag."""
    if flag.is_word:
        return typer.Argument(help=flag.help, metavar=flag.metavar)
    callback = flag.callback
    return typer.Option(
        *flag.names,
        help=flag.help,
        min=flag.min,
        max=flag.max,
        metavar=flag.metavar,
        rich_help_panel=flag.panel,
        callback=None if callback is None else lambda value: callback(name, value),
    )
