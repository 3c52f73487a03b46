"""A module is a tree of parameters with a forward function. The attributes are the tree: nothing is registered.

Parameters and modules are found among the attributes in the order in which they were set, in lists by position and in
dicts by key, so that `model.transformer.h[0].attn.c_attn.weight` is called "transformer.h.0.attn.c_attn.weight".

    module(x)  =  forward pre-hooks ──▶ forward ──▶ forward hooks

Parallelism replaces a submodule, or a function that a module calls (`attention_fn`, `loss_fn`), or registers a hook.

Proved by: tests/nn/test_modules.py, tests/nn/test_hooks.py, tests/nn/test_describe.py, tests/nn/test_module_to.py
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from minidist.core.autograd import Parameter, Tensor
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.random import initial_weight

Hook = Callable[..., Any]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")  # attributes of a module that hold no part of the model
_SETTINGS = frozenset({bool, int, float, str, type(None)})  # classes of attributes that hold none either


class Module:
    """Base of layers and models. Subclasses set parameters and submodules as attributes and define `forward`.

    name: qualified name in the model, set by `initialize`; keys of random draws are made of it.
    training: True until `eval()`; dropout looks at it. minidist/nn/state.py has `train`, `eval`, `to`, `state_dict` and
    `load_state_dict`, which the core does without.
    """

    name: str = ""
    training: bool = True

    # Each entry is (hook, with_kwargs). Registering and removing replace the dict, so the class's empty one is shared.
    _forward_pre_hooks: Mapping["HookHandle", tuple[Hook, bool]] = {}
    _forward_hooks: Mapping["HookHandle", tuple[Hook, bool]] = {}

    train, eval, to, state_dict, load_state_dict = (
        hooks.added("module_methods", name) for name in ("train", "eval", "to", "state_dict", "load_state_dict")
    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Each pre-hook sees what the one before has returned.
        for hook, with_kwargs in self._forward_pre_hooks.values():
            changed = hook(self, args, kwargs) if with_kwargs else hook(self, args)
            if with_kwargs and changed is not None:
                args, kwargs = changed
            elif changed is not None:
                hooks.refusals().refuse_changed(self, "forward pre-hook", hook, args, changed)
                args = changed if isinstance(changed, tuple) else (changed,)
        output = self.forward(*args, **kwargs)
        if output.__class__ is not Tensor and xp.is_array(output) and output.dtype.kind == "f":
            hooks.refusals().refuse_output(self, args, output)
        for hook, with_kwargs in self._forward_hooks.values():
            changed = hook(self, args, kwargs, output) if with_kwargs else hook(self, args, output)
            if changed is not None:
                hooks.refusals().refuse_changed(self, "forward hook", hook, output, changed)
                output = changed
        return output

    def register_forward_pre_hook(
        self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False
    ) -> "HookHandle":
        """Call hook(module, args) before each forward. It returns None, or what takes the place of the arguments.

        prepend: run it before the hooks registered so far, not after them. with_kwargs: the hook is called with
        (module, args, kwargs) and returns None or (args, kwargs). Returns a handle with `remove()`.
        """
        return self._register("_forward_pre_hooks", hook, prepend, with_kwargs)

    def register_forward_hook(self, hook: Hook, *, prepend: bool = False, with_kwargs: bool = False) -> "HookHandle":
        """Call hook(module, args, output) after each forward. It returns None, or what takes the place of the output.

        prepend: see above. with_kwargs: the hook is called with (module, args, kwargs, output).
        """
        return self._register("_forward_hooks", hook, prepend, with_kwargs)

    def _register(self, kind: str, hook: Hook, prepend: bool, with_kwargs: bool) -> "HookHandle":
        handle = HookHandle(self, kind)
        entry, others = {handle: (hook, with_kwargs)}, getattr(self, kind)
        setattr(self, kind, {**entry, **others} if prepend else {**others, **entry})
        return handle

    def _members(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, module or parameter) of the attributes, and of the entries of lists, tuples and dicts."""
        for key, value in vars(self).items():
            if type(value) in _SETTINGS:
                continue
            if isinstance(value, (Module, Parameter)):
                yield key, value
            elif key not in _HOOKS:
                yield from _entries(key, value)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        """Yield (qualified name, module) of this module and all below it, parents first."""
        yield prefix, self
        for key, value in self._members():
            if isinstance(value, Module):
                yield from value.named_modules(f"{prefix}.{key}" if prefix else key)

    def modules(self) -> Iterator["Module"]:
        """This module and all below it, parents first."""
        return (module for _, module in self.named_modules())

    def _all_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """As `named_parameters`, but a tied parameter under each of its names."""
        # First the parameters of this module, then those of the modules below it.
        below: list[tuple[str, Module]] = []
        for key, value in self._members():
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(value, Parameter):
                yield name, value
            else:
                below.append((name, value))
        for path, module in below:
            yield from module._all_parameters(path)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield (qualified name, parameter); a tied parameter once, under its first name."""
        seen: set[Parameter] = set()
        for name, parameter in self._all_parameters(prefix):
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def parameters(self) -> Iterator[Parameter]:
        """The parameters, a tied one once."""
        return (parameter for _, parameter in self.named_parameters())

    def initialize(self, seed: int | None = 0, prefix: str = "") -> Self:
        """Name every module and parameter from here on and draw the initial values.

        A value depends on (seed, qualified name, global shape) only, so every rank draws the same model. Call it on
        the whole model (models of this package do so themselves); a part of a model gets its qualified name as
        `prefix`. Does nothing with seed=None, for a part of a model that the whole initializes.
        """
        if seed is None:
            return self
        # Modules need their names, too: dropout's draws are keyed by them.
        for name, module in self.named_modules(prefix):
            module.name = name

        # Drawn by name and global shape. A shard cannot be: it does not know the rest of the array.
        for name, parameter in self.named_parameters(prefix):
            parameter.name = name
            if parameter.layout is not None:
                hooks.refusals().check_whole_parameter(parameter)
            if parameter.init is not None:
                law, scale = parameter.init
                values = initial_weight(seed, name, parameter.shape, law, scale)
                parameter.data[...] = xp.as_array(values, parameter.dtype)
                parameter.updated()
        return self

    def zero_grad(self) -> None:
        """Forget all gradients."""
        # Flat units that lie in this module as a whole are cleared at once, with their shards.
        mine = dict.fromkeys(self.parameters())
        for flat in dict.fromkeys(p.flat for p in mine if p.flat is not None):
            if all(p in mine for p in flat.parameters):
                flat.zero_grad()
        for parameter in mine:
            parameter.zero_grad()

    def __repr__(self) -> str:
        return hooks.describe(self)


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, module or parameter) of a value that is one, or of the entries of a list, tuple or dict."""
    if isinstance(value, (Module, Parameter)):
        yield name, value
    elif isinstance(value, (set, frozenset)):
        hooks.refusals().check_set(name, value)
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries(f"{name}.{key}", item)


@dataclass(frozen=True, eq=False)
class HookHandle:
    """Names one registered hook of one module, so that it can be removed."""

    module: Module
    kind: str  # the attribute of the module that holds its hooks of this kind

    def remove(self) -> None:
        """Remove the hook; a second call has no effect."""
        # A new dict, so that a forward that is running goes on with the hooks it began with.
        left = {handle: entry for handle, entry in getattr(self.module, self.kind).items() if handle is not self}
        setattr(self.module, self.kind, left)


class Identity(Module):
    """Returns its input. It marks a place in a module where a parallel style puts a module that communicates."""

    def forward(self, x: Any) -> Any:
        return x


class Sequential(Module):
    """Modules (or functions of one tensor) applied one after the other; their names are their positions: "layers.0"."""

    def __init__(self, *layers: Any) -> None:
        self.layers = list(layers)

    @property
    def blocks(self) -> list[Any]:
        """The layers, in order: what a pipeline cuts between."""
        return self.layers

    def stage(self, first: int, last: int, is_first: bool, is_last: bool) -> "Sequential":
        """Return layers first..last-1 as a stage of a pipeline."""
        return Sequential(*self.layers[first:last])

    def forward(self, x: Any) -> Any:
        return run_blocks(self.layers, x)


def run_blocks(blocks: Sequence[Callable[..., Any]], x: Any, *others: Any) -> Any:
    """blocks[-1](...blocks[0](x)): one after the other, or as the list itself says (`segments.SegmentedBlocks`).

    others: what each block takes in addition to x (no tensor that needs a gradient).
    """
    if hasattr(blocks, "run"):
        return blocks.run(x, *others)
    for block in blocks:
        x = block(x, *others)
    return x
