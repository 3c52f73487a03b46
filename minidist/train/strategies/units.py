"""The units of ZeRO 3: which parameters of a stage are gathered and released together, and so lie in one flat array.

    a stage   | wte | wpe  h.0  h.1  h.2 |        each block is a unit; what is left of the stage is one, gathered throughout
              | tied| rest |   |    |    |        a weight that another stage has too is one: its copies must be cut alike

The reference asks too: it takes the gradient norm in the order of the units.
"""

from collections.abc import Collection
from typing import Any

from minidist.autograd import Parameter
from minidist.nn import Module


def shard_modules(module: Any, tied: Collection[str] = ()) -> list[Module]:
    """The modules that ZeRO 3 shards as units, bottom up: what holds a tied weight, the blocks (layers of an MLP), the
    rest.
    """
    apart = [
        part
        for part in module.modules()
        if part is not module and any(p.name in tied for p in vars(part).values() if isinstance(p, Parameter))
    ]
    for owner, name in (("transformer", "h"), ("model", "layers"), ("", "h"), ("", "layers")):
        inner = getattr(module, owner, None) if owner else module
        if hasattr(inner, name):
            return [*apart, *getattr(inner, name), module]
    return [*apart, module]


def unit_parameters(
    module: Module, persistence_threshold: int = 0, tied: Collection[str] = ()
) -> list[list[Parameter]]:
    """The parameters of each of these units, the module's own first; a parameter belongs to the first unit that has it.

    A module's parameters of fewer than `persistence_threshold` elements are a unit of their own, after the others.
    """
    units: list[list[Parameter]] = []
    seen: set[Parameter] = set()
    for part in shard_modules(module, tied):
        units.append([p for p in part.parameters() if p not in seen])
        seen.update(units[-1])
    parts = [
        [p for p in unit if (p.size < persistence_threshold) is small]
        for unit in (units[-1], *units[:-1])
        for small in (False, True)
    ]
    return [part for part in parts if part]
