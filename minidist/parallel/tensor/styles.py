"""What the styles of a plan have in common that are not the class of a layer.

    plan = {"layers.0": ColumnParallelLinear, "layers.1": RowParallelLinear, "norm": SequenceParallel()}

Proved by: tests/parallel/test_tensor.py
"""

from typing import Any

from minidist.core.nn.module import Module
from minidist.core.parallel.tensor_parallel import ShardContext
from minidist.parallel.weights_check import not_for


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
        if not isinstance(module, kinds):
            raise not_for(type(self).__name__, module, name, kinds)
