"""Records: classes whose values are checked against the types and bounds of their fields.

    class Job(Record):
        steps: int = Field(20, ge=1, description="optimizer steps")
        reduction: Literal["ring", "naive"] = "ring"

    Job(steps="5").steps == 5
    Job(steps=0)                    raises WrongValue: steps: Input should be greater than or equal to 1

The settings of a job are records, and what a file says in which nothing is believed before it is checked. The names of
the methods and the sentences are pydantic's, which takes longer to import than a small job takes to run.

Proved by: tests/base/test_records.py
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from minidist.base.limits import is_size, size_range

REQUIRED: Any = object()  # the default of a field that has none


class WrongValue(ValueError):
    """A value that a field cannot have.

    message: what is wrong, a sentence without the place. place: the names and indices that lead to the value. value:
    what was given. unknown: whether no field has the name.
    """

    def __init__(self, message: str, place: tuple[str | int, ...] = (), value: Any = None, unknown: bool = False):
        super().__init__(message)
        self.message, self.place, self.value, self.unknown = message, place, value, unknown

    @property
    def path(self) -> str:
        """The place as text: tensors.wte.shape.0."""
        return ".".join(map(str, self.place))

    @property
    def clause(self) -> str:
        """The message as it continues a sentence."""
        return self.message[0].lower() + self.message[1:]

    def __str__(self) -> str:
        return f"{self.path[:80]}: {self.message}" if self.place else self.message


@dataclass(frozen=True, eq=False)  # so that it may be in `Annotated`
class FieldInfo:
    """What a class says about a field.

    bounds: gt, ge, lt, le of a number; allow_inf_nan=False; min_length, max_length of a list; pattern of a text. read:
    changes what is given before it is checked. check: raises WrongValue for a value that has the type and is wrong.
    """

    default: Any
    description: str
    bounds: Mapping[str, Any]
    read: Callable[[Any], Any] | None = None
    check: Callable[[Any], None] | None = None
    annotation: Any = None


def Field(
    default: Any = REQUIRED,
    *,
    description: str = "",
    read: Callable[[Any], Any] | None = None,
    check: Callable[[Any], None] | None = None,
    **bounds: Any,
) -> Any:
    """Return what a class says about a field, as its value in the class body or in `Annotated`: see `FieldInfo`."""
    return FieldInfo(default, description, bounds, read, check)


class Record:
    """The base class. A record is made from keyword arguments, and does not change.

    class X(Record, strict=True): a value must have the type of its field; else a text that reads as a number is one.
    forbid=True: an argument that is no field is refused, not left out. model_fields: the fields by name, those of base
    classes first. Raises WrongValue for the first field that is wrong.
    """

    model_fields: ClassVar[dict[str, FieldInfo]] = {}
    _strict: ClassVar[bool] = False
    _forbid: ClassVar[bool] = False

    def __init_subclass__(cls, strict: bool | None = None, forbid: bool | None = None) -> None:
        if strict is not None:
            cls._strict = strict
        if forbid is not None:
            cls._forbid = forbid
        fields: dict[str, FieldInfo] = {}
        for base in reversed(cls.__mro__[1:]):
            fields.update(vars(base).get("model_fields", {}))
        for name, annotation in cls.__annotations__.items():
            if getattr(annotation, "__origin__", None) is not ClassVar:
                given = vars(cls).get(name, REQUIRED)
                info = given if isinstance(given, FieldInfo) else FieldInfo(given, "", {})
                fields[name] = replace(info, annotation=annotation)
                if given is not REQUIRED:
                    delattr(cls, name)
        cls.model_fields = fields

    def __init__(self, /, **values: Any) -> None:
        try:
            values = self.completed(values)
            for name, field in self.model_fields.items():
                if name not in values and field.default is REQUIRED:
                    raise WrongValue("Field required", (name,), values)
                vars(self)[name] = _given(field, name, values[name], self._strict) if name in values else field.default
            for name in values if self._forbid else ():
                if name not in self.model_fields:
                    raise WrongValue("Extra inputs are not permitted", (name,), values[name], unknown=True)
        except WrongValue as error:
            raise self.told(error) from None

    def told(self, error: WrongValue) -> WrongValue:
        """Return the error as it is raised; a class may say it in other words."""
        return error

    @classmethod
    def completed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments with defaults that depend on other arguments."""
        return values

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """Return the record of a dict; WrongValue for anything else."""
        if not isinstance(values, dict):
            raise WrongValue(f"Input should be a valid dictionary or instance of {cls.__name__}", value=values)
        return cls(**values)

    def model_dump(self, exclude_defaults: bool = False) -> dict[str, Any]:
        """Return the values by name. exclude_defaults: only those that differ from their defaults."""
        values = {name: getattr(self, name) for name in self.model_fields}
        if not exclude_defaults:
            return values
        return {name: value for name, value in values.items() if value != self.model_fields[name].default}

    def model_copy(self, update: Mapping[str, Any]) -> Self:
        """Return a record with other values, which are not checked."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **update)
        return copy

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} does not change; use model_copy(update={{{name!r}: ...}})")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _given(field: FieldInfo, name: str, given: Any, strict: bool) -> Any:
    """Return the value of a field from the argument that is given for it."""
    try:
        value = checked(field.annotation, given if field.read is None else field.read(given), field.bounds, strict)
        if field.check is not None:
            field.check(value)
        return value
    except WrongValue as error:
        raise _inside(error, name, given) from None


def _inside(error: WrongValue, key: str | int, given: Any) -> WrongValue:
    """Return an error about the entry `key` of what it was found in. given: the entry."""
    return WrongValue(error.message, (key, *error.place), error.value if error.place else given, error.unknown)


def checked(kind: Any, value: Any, bounds: Mapping[str, Any], strict: bool) -> Any:
    """Return a value as the type `kind`: one of JSON, a Literal, a union, or a record.

    Raises WrongValue. bounds: as in `FieldInfo`. strict: whether the value must have the type already.
    """
    if kind is Any:
        return value
    if kind in SCALARS:
        return SCALARS[kind](value, bounds, strict)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return checked(parts[0], value, {**bounds, **parts[1].bounds}, strict)
    if origin is Literal:
        return _one_of(parts, value)
    if origin in (Union, UnionType):
        return _member(parts, value, bounds, strict)
    if origin in (list, dict):
        return _entries(origin, parts, value, bounds, strict)
    return kind.model_validate(value)


def _one_of(allowed: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, str) and value in allowed:
        return value
    *most, last = map(repr, allowed)
    raise WrongValue(f"Input should be {', '.join(most)}{' or ' * bool(most)}{last}")


def _member(kinds: tuple[Any, ...], value: Any, bounds: Mapping[str, Any], strict: bool) -> Any:
    """Return a value as the first of several types that takes it; the error is that of the last one."""
    if value is None and NoneType in kinds:
        return None
    *most, last = (kind for kind in kinds if kind is not NoneType)
    for kind in most:
        try:
            return checked(kind, value, bounds, strict)
        except WrongValue:
            pass
    return checked(last, value, bounds, strict)


def _entries(origin: Any, parts: tuple[Any, ...], value: Any, bounds: Mapping[str, Any], strict: bool) -> Any:
    """Return a list or a dict whose entries are checked."""
    if not isinstance(value, origin):
        raise WrongValue(f"Input should be a valid {'list' if origin is list else 'dictionary'}")
    if len(value) < bounds.get("min_length", 0):
        raise WrongValue(f"List should have at least {_count(bounds['min_length'])}, not {len(value)}")
    if len(value) > bounds.get("max_length", math.inf):
        raise WrongValue(f"List should have at most {_count(bounds['max_length'])}, not {len(value)}")
    entries = {}
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        try:
            entries[key] = checked(parts[-1], entry, {}, strict)
        except WrongValue as error:
            raise _inside(error, key, entry) from None
    return entries if origin is dict else list(entries.values())


def _count(items: int) -> str:
    return f"{items} item{'s' * (items != 1)} after validation"


# --- one value --------------------------------------------------------------------------------------------------------

COMPARED = {
    "le": (operator.le, "less than or equal to"),
    "lt": (operator.lt, "less than"),
    "ge": (operator.ge, "greater than or equal to"),
    "gt": (operator.gt, "greater than"),
}


def _within(value: Any, bounds: Mapping[str, Any]) -> Any:
    """Return a number that is within its bounds."""
    for name, (holds, words) in COMPARED.items():
        if name in bounds and not holds(value, bounds[name]):
            bound = bounds[name]
            raise WrongValue(f"Input should be {words} {int(bound) if bound == int(bound) else bound}")
    return value


def _whole(value: Any, bounds: Mapping[str, Any], strict: bool) -> int:
    if type(value) is int:
        return _within(value, bounds)  # type: ignore[no-any-return]
    if isinstance(value, float) and not strict:
        if not math.isfinite(value):
            raise WrongValue("Input should be a finite number")
        if value != int(value):
            raise WrongValue("Input should be a valid integer, got a number with a fractional part")
    elif isinstance(value, str) and not strict:
        value = value.strip()
        if not re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?", value) or len(value) > 4_300:
            raise WrongValue("Input should be a valid integer, unable to parse string as an integer")
        value = value.partition(".")[0]
    elif not isinstance(value, bool) or strict:
        raise WrongValue("Input should be a valid integer")
    return _within(int(value), bounds)  # type: ignore[no-any-return]


def _number(value: Any, bounds: Mapping[str, Any], strict: bool) -> float:
    if not isinstance(value, (int, float) if strict else (int, float, str)) or (strict and isinstance(value, bool)):
        raise WrongValue("Input should be a valid number")
    try:
        # Digits of other scripts than ASCII's are not those of a file.
        number = float(value.encode("ascii") if isinstance(value, str) else value)
    except OverflowError:
        raise WrongValue("Input should be a valid number") from None
    except ValueError:
        raise WrongValue("Input should be a valid number, unable to parse string as a number") from None
    if strict and not math.isfinite(number) and not bounds.get("allow_inf_nan", True):
        raise WrongValue("Input should be a finite number")
    _within(number, bounds)
    if not strict and not is_size(number):
        zero = not (bounds.get("gt", -1) >= 0 or bounds.get("ge", 0) > 0)
        raise WrongValue(f"Input should be {size_range(zero)}")
    return number


def _truth(value: Any, bounds: Mapping[str, Any], strict: bool) -> bool:
    if isinstance(value, bool) or (not strict and isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    known = not strict and isinstance(value, (int, str))
    if known and str(value).lower() in ("1", "on", "t", "true", "y", "yes"):
        return True
    if known and str(value).lower() in ("0", "off", "f", "false", "n", "no"):
        return False
    raise WrongValue(f"Input should be a valid boolean{', unable to interpret input' * known}")


def _text(value: Any, bounds: Mapping[str, Any], strict: bool) -> str:
    if not isinstance(value, str):
        raise WrongValue("Input should be a valid string")
    if "pattern" in bounds and not re.fullmatch(bounds["pattern"], value):
        raise WrongValue(f"String should match pattern '{bounds['pattern']}'")
    return value


SCALARS: dict[Any, Callable[[Any, Mapping[str, Any], bool], Any]] = {
    bool: _truth,
    float: _number,
    int: _whole,
    str: _text,
}
