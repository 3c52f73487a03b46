"""An operation that a user defines, as with `torch.autograd.Function`; the communication nodes of
tensor parallelism are examples.

class CopyToRegion(Function):
    @staticmethod
    def forward(ctx, x, comm):      # arrays in the place of tensors; other arguments as they are
        ctx.comm = comm
        return x

    @staticmethod
    def backward(ctx, grad):        # one gradient for each tensor argument, None for no gradient
        return all_reduce(ctx.comm, grad)

y = CopyToRegion.apply(x, comm)

Proved by: tests/autograd/test_extending.py
"""

from typing import Any

from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks


class Context:
    """Carries any attributes from forward to backward. `needs_input_grad` has one bool per tensor argument."""

    needs_input_grad: tuple[bool, ...]


class Function:
    """Base of operations with a hand-written backward. Subclasses define static `forward` and `backward`.

    forward must return a new array or a view of an input, and must not change its inputs. backward must not change
    `grad` unless it copies it. `flops`, when set on ctx by forward, is reported to the FLOP counter (default 0).
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> xp.Array:
        """Compute the result from arrays."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, grad: xp.Array) -> Any:
        """The gradients of the tensor arguments, from the gradient of the result."""
        raise NotImplementedError

    @classmethod
    def apply(cls, *args: Any) -> Tensor:
        """Run forward and record the node."""
        ctx = Context()
        name = cls.__name__
        tensors = [a for a in args if isinstance(a, Tensor)]
        ctx.needs_input_grad = tuple(t.requires_grad for t in tensors)
        result = cls.forward(ctx, *[a.data if isinstance(a, Tensor) else a for a in args])
        shapes = [t.shape for t in tensors]

        def prepare(g: xp.Array) -> tuple[Any, ...]:
            gradients = cls.backward(ctx, g)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            if [None if gradient is None else gradient.shape for gradient in gradients] != shapes:
                hooks.operation_checks().check_gradients(name, gradients, shapes, ctx.needs_input_grad)
            return gradients

        # A view: a gradient may be shared, so backward does not add to it in place.
        edges = [(t, lambda gradients, i=i: gradients[i][...]) for i, t in enumerate(tensors)]
        return record(name, result, edges, prepare=prepare, cost=getattr(ctx, "flops", 0))
