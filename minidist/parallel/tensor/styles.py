"""What the styles of a plan have in common that are not the class of a layer, and what all styles refuse.

    plan = {"layers.0": ColumnParallelLinear, "layers.1": RowParallelLinear, "norm": SequenceParallel()}

Proved by: tests/parallel/test_tensor.py
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.core.nn.gpt import Attention, LanguageModel, TiedHead
from minidist.core.nn.layers import Conv1D, Embedding, Linear
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, split_heads
from minidist.core.parallel.tensor.sharding import ShardContext
from minidist.core.parallel.tensor.vocabulary import VocabParallelEmbedding, VocabParallelHead, split_loss

# The modules that each layer, or function of the core, splits.
KINDS: dict[Any, tuple[type, ...]] = {
    ColumnParallelLinear: (Linear, Conv1D),
    RowParallelLinear: (Linear, Conv1D),
    VocabParallelEmbedding: (Embedding,),
    VocabParallelHead: (TiedHead, Linear),
    split_heads: (Attention,),
    split_loss: (LanguageModel,),
}


class ParallelStyle:
    """How one module is split: `apply` returns what takes its place (or the module itself, with hooks)."""

    def __call__(self, module: Any, context: ShardContext, name: str) -> Module:
        """Do what `apply` does, for `parallelize_module`."""
        return self.apply(module, name, context)

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return what takes the place of `module`, which has the qualified name `name`."""
        raise NotImplementedError

    def expect(self, module: Any, name: str, *kinds: type) -> None:
        """Raise UsageError, saying which kinds of module the style is for, unless `module` is one of them."""
        _expect(type(self).__name__, module, name, kinds)


def check_plan(module: Module, plan: Mapping[str, Any]) -> None:
    """Raise UsageError where a layer of the core, or a function, is to split a module that it cannot split."""
    for name, part in module.named_modules():
        for pattern, styles in plan.items():
            if fnmatchcase(name, pattern):
                for style in styles if isinstance(styles, list) else [styles]:
                    _check(style.func if isinstance(style, partial) else style, part, name)


def _check(style: Any, module: Any, name: str) -> None:
    # A class of another layer is a subclass of one of these; a `ParallelStyle` refuses by itself.
    own = getattr(style, "__mro__", () if isinstance(style, ParallelStyle) else (style,))
    base = next((kind for kind in own if kind in KINDS), None)
    if base is None:
        return
    _expect(style.__name__, module, name, KINDS[base])
    if base is RowParallelLinear and module.activation is not None:
        raise UsageError(
            f"{name} has activation {module.activation!r}, which cannot be applied to the summands of a"
            " row-parallel layer; give it ColumnParallelLinear, or take the activation out"
        )
    if base is VocabParallelHead and getattr(module, "bias", None) is not None:
        raise UsageError(f"the head {module.name!r} has a bias; a vocabulary-parallel head has none")


def _expect(style: str, module: Any, name: str, kinds: tuple[type, ...]) -> None:
    if not isinstance(module, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise UsageError(f"{style} is for {wanted}; {name!r} is a {type(module).__name__}")
