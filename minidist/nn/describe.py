"""`print(model)`: the tree of modules, with the shapes of the parameters and their number of elements.

    MLP(  # 212 parameters
      (layers.0): Linear(weight (16, 8), bias (16,))  # 144
      (layers.1): Linear(weight (4, 16), bias (4,))  # 68
    )

As PyTorch prints it, but with shapes in place of the arguments. Equal neighbours are one line
("(h.0-11): 12 x Block"). For a sharded parameter it prints the number of shards and the shape of the whole.

Proved by: tests/nn/test_describe.py
"""

import re
from itertools import groupby
from typing import Any

from minidist.core.autograd import Parameter
from minidist.nn.dropout import Dropout

Lines = list[str]


def describe(module: Any) -> str:
    """Return the tree of `module` as text; a tied parameter counts once."""
    lines, elements = _describe(module, set())
    lines[0] = f"{lines[0].partition('  # ')[0]}  # {elements:,} parameters"
    return "\n".join(lines)


def _describe(module: Any, seen: set[Parameter]) -> tuple[Lines, int]:
    """Return the lines of a module and the number of its elements, without those of the parameters `seen` before."""
    # Its settings and its own parameters stand in the parentheses; the modules inside below.
    words, children, elements = [_settings(module)], [], 0
    for name, member in module._members():
        if isinstance(member, Parameter):
            words.append(f"{name} {_parameter(member, member in seen)}")
            elements += 0 if member in seen else member.size
            seen.add(member)
        else:
            children.append((name, *_describe(member, seen)))

    below: Lines = []
    for name, lines, inside in _merged(children):
        elements += inside
        below += [f"  ({name}): {lines[0]}", *(f"  {line}" for line in lines[1:])]
    head = f"{type(module).__name__}({', '.join(word for word in words if word)}"
    total = f"  # {elements:,}" if elements else ""
    return [head + (")" if not below else "") + total, *below, *([")"] if below else [])], elements


def _settings(module: Any) -> str:
    """Return what a module says of its settings (`extra_repr`): a layer its activation, dropout its probability."""
    if hasattr(module, "extra_repr"):
        return str(module.extra_repr())
    if isinstance(module, Dropout):
        return f"p={module.p}"
    return f"activation={module.activation!r}" if getattr(module, "activation", None) else ""


def _merged(children: list[tuple[str, Lines, int]]) -> list[tuple[str, Lines, int]]:
    """Return (name, lines, elements) with neighbours of equal lines in one list as one: h.0 to h.11 as h.0-11."""
    result = []
    for _, group in groupby(children, key=lambda child: (re.sub(r"\d+$", "", child[0]), child[1])):
        members = list(group)
        name, lines, _ = members[0]
        if len(members) > 1:
            name = f"{name}-{re.sub(r'.*[^0-9]', '', members[-1][0])}"
            lines = [f"{len(members)} x {lines[0]}", *lines[1:]]
        result.append((name, lines, sum(elements for _, _, elements in members)))
    return result


def _parameter(parameter: Parameter, tied: bool) -> str:
    """Return a parameter's shape, and what is not usual about it."""
    words = [str(parameter.shape)]
    if parameter.dtype != "float32":
        words.append(str(parameter.dtype))
    layout, shard = parameter.layout, None if parameter.flat is None else parameter.flat.shard
    if layout is not None and layout.axes:
        words.append(f"of {layout.global_shape} over {' and '.join(layout.axes)}")
    if shard is not None:
        words.append(f"in {shard.comm.size} shards")
    words += ["frozen"] * (not parameter.requires_grad) + ["tied"] * tied
    return " ".join(words)
