"""The techniques that a job may use in addition to its layout, one folder each. `extension.py` is their interface.

docs/techniques.md lists them: what each does, what a rank sends for it, its tests and its lesson.

Adding a technique is adding a folder with an `__init__.py`, whose `extension.py` defines one subclass of `Extension`;
deleting the folder deletes the technique with its flags, rules and bytes. `--extension FILE.py:CLASS` adds one from a
user's file.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.records import Field, Record, WrongValue
from minidist.base.user_file import load_function
from minidist.techniques.extension import AxisRun, Extension, History, Moment, Run, Settings
from minidist.techniques.own_loop import OwnLoop
from minidist.techniques.rule import Rule, Value, multiples, setting, without_effect


@cache
def installed() -> tuple[type[Extension], ...]:
    """Return the extensions of all folders, in the order of their names.

    Raises UsageError for a folder with an extension.py and no __init__.py, which is no package.
    """
    folders = sorted(file.parent for file in Path(__file__).parent.glob("*/extension.py"))
    for folder in folders:
        if not (folder / "__init__.py").exists():
            raise UsageError(f"{quoted_path(folder)} has an extension.py and no __init__.py; add an empty one")
    return tuple(_of(import_module(f"{__name__}.{folder.name}.extension")) for folder in folders)


def _of(module: Any) -> type[Extension]:
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Extension) and value.__module__ == module.__name__
    )
    return found


def of_job(config: Any) -> Iterator[Extension]:
    """Yield the extensions of the techniques that a job uses, with their settings; those of `--extension` come last."""
    for kind in touched(config):
        if kind.used_by(config):
            yield kind(kind.Settings(**{name: getattr(config, name) for name in kind.Settings.model_fields}))
    if config.extension:
        yield from of_users(config)


def touched(config: Any) -> Iterator[type[Extension]]:
    """Yield the techniques that a job uses: those with a flag, or one of their `switches`, that the job changes."""
    for kind, quiet in _quiet():
        for name, value in quiet:
            if getattr(config, name) != value:
                yield kind
                break


@cache
def _quiet() -> tuple[tuple[type[Extension], tuple[tuple[str, Any], ...]], ...]:
    """Return each technique with the values of settings with which no job uses it."""
    return tuple(
        (kind, (*((name, field.default) for name, field in kind.Settings.model_fields.items()), *kind.switches))
        for kind in installed()
    )


def defaults() -> dict[str, Any]:
    """Return the settings of a job that uses none of the techniques."""
    return {name: field.default for kind in installed() for name, field in kind.Settings.model_fields.items()}


def changes_batches(config: Any) -> bool:
    """Return whether a job's ranks choose their batches, or the shares of them, while they train."""
    return any(kind.changes_batches(config) for kind in touched(config))


def trains_alone(config: Any) -> bool:
    """Return whether each data-parallel rank of a job steps its replica alone, so that replicas differ."""
    return any(extension.trains_alone for extension in of_job(config))


def drains(config: Any) -> bool:
    """Return whether a job's pipeline is empty at the end of every step; also True without a pipeline."""
    return all(extension.drains for extension in of_job(config))


def own_loop(config: Any) -> OwnLoop | None:
    """Return the training loop that a technique of a job has in place of the job's, or None."""
    for extension in of_job(config):
        if (loop := extension.own_loop(config)) is not None:
            return loop
    return None


def packs_inputs(config: Any) -> bool:
    """Return whether the inputs of recomputed blocks wait elsewhere, so that blocks of a pipeline recompute, too."""
    return any(extension.packs_inputs() for extension in of_job(config))


def sums_buckets(config: Any) -> bool:
    """Return whether a technique of a job sums the buckets of gradients in place of the job's --reduction."""
    return any(extension.sums_buckets for extension in of_job(config))


def wrapper_options(config: Any) -> dict[str, Any]:
    """Return the arguments that techniques give to what wraps the model on the data axis."""
    options: dict[str, Any] = {}
    for extension in of_job(config):
        options |= extension.wrapper_options(config)
    return options


def model_options(config: Any) -> dict[str, Any]:
    """Return the arguments that techniques give to the model of a job."""
    options: dict[str, Any] = {}
    for extension in of_job(config):
        options |= extension.model_options(config)
    return options


def joins_replicas(config: Any) -> str:
    """Return the flag with which a micro-batch of a job has the rows of all replicas; "" without one."""
    return next((found for extension in of_job(config) if (found := extension.joins_replicas())), "")


def recomputed(config: Any) -> str:
    """Return what runs again in backward in a job: see `Extension.recomputes`."""
    return next((found for extension in of_job(config) if (found := extension.recomputes()) != "none"), "none")


def replayed(config: Any) -> tuple[int, ...] | range:
    """Return the stages of a job's pipeline whose whole forward pass runs again before their backward."""
    return next((found for extension in of_job(config) if (found := extension.replays(config))), ())


def reduces_each(config: Any) -> bool:
    """Return whether a job reduces gradients after every micro-batch, as ZeRO 2 and 3 do in any case."""
    return any(extension.reduces_each for extension in of_job(config))


def history(config: Any) -> History:
    """Return which checkpoints of a job's --save directory count."""
    return next((found for extension in of_job(config) if (found := extension.history()) != History()), History())


@cache
def weight_differences() -> frozenset[str]:
    """Return the kinds of optimizer state that are differences of weights: see `Extension.weight_differences`."""
    return frozenset(name for kind in installed() for name in kind.weight_differences)


def ranks_beside(config: Any, ranks: int | None = None) -> int:
    """Return how many of a job's ranks are outside of its layout: see `Extension.beside`."""
    beside = 0
    for kind in touched(config):
        beside += kind.beside(config, None if ranks is None else ranks - beside)
    return beside


def of_users(config: Any) -> Iterator[Extension]:
    """Yield the extensions of `--extension FILE.py:CLASS,SETTING=VALUE,...`, which may name several classes.

    Raises UsageError for a file, a class, a setting or a value that is wrong, and for two classes with the same key.
    """
    words = config.extension.split(",") if config.extension else []
    keys = {kind.key for kind in installed()}
    while words:
        source, values = words.pop(0), {}
        while words and "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            values[name.strip().replace("-", "_")] = value
        if words and ".py" not in words[0]:
            raise UsageError(
                f"--extension {quoted(source)}: the setting {quoted(words[0])} has no value; write {words[0]}=VALUE"
            )
        kind = _loaded(source)
        if kind.key in keys:
            raise UsageError(
                f"--extension {quoted(source)}: another extension has the key {quoted(kind.key)}, under which a"
                " checkpoint keeps its state; give the class a different `key`"
            )
        keys.add(kind.key)
        for name in kind.fixed:
            if name not in kind.Settings.model_fields:
                raise UsageError(
                    f"--extension {quoted(source)}: `fixed` names {quoted(name)}, which is not a setting of the class;"
                    f" the settings are {', '.join(kind.Settings.model_fields) or 'none'}"
                )
        try:
            yield kind(_settings(kind, values))
        except WrongValue as error:
            wrong = f"{error.path}={quoted(error.value)}: {error.clause}"
            if error.unknown:
                wrong = f"unknown setting {quoted(error.path)}{nearest(error.path, kind.Settings.model_fields)}"
            known = ", ".join(kind.Settings.model_fields) or "none"
            raise UsageError(f"--extension {quoted(source)}: {wrong}; its settings are: {known}") from None


def _settings(kind: type[Extension], values: dict[str, str]) -> Any:
    """Return the settings of a user's class. WrongValue for a name that it does not have, whatever its record does."""
    settings = kind.Settings(**values)
    for name, value in values.items():
        if name not in kind.Settings.model_fields:
            raise WrongValue("Extra inputs are not permitted", (name,), value, unknown=True)
    return settings


@cache
def _loaded(source: str) -> type[Extension]:
    kind = load_function(source, "class")
    if not (isinstance(kind, type) and issubclass(kind, Extension)):
        raise UsageError(
            f"--extension {quoted(source)} is not a subclass of minidist.techniques.Extension; derive the class from it"
        )
    return kind
