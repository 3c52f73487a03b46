"""The borders of a region in which matrices are split: Megatron's f and g, as nodes of the tape.

Inside a region every rank holds a shard of the activations; outside all ranks hold the same. At a border, backward does
the adjoint of what forward does:

    region                                       forward             backward
    copy_to_tensor_parallel_region        (f)    nothing             all-reduce
    reduce_from_tensor_parallel_region    (g)    all-reduce          nothing

Activations are (batch, T, features). Forward messages have the purpose `tensor_forward`, backward ones
`tensor_backward`. Over one rank a border does nothing. `minidist/parallel/tensor` has borders that gather.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. The functions have Megatron-LM's names.
Proved by: tests/parallel/test_tensor.py
"""

from collections.abc import Callable
from typing import Any

from minidist.core.autograd import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, check_communicator


def copy_to_tensor_parallel_region(x: Any, comm: Comm) -> Tensor:
    """f: return x, a tensor or an array, as it is; backward sums its gradient over `comm`.

    Also for a replicated parameter that is used on split data: each rank then has a part of its gradient.
    """
    try:
        if comm.size == 1:
            return x
    except AttributeError:
        check_communicator(comm, "copy_to_tensor_parallel_region")
        raise
    x = x if isinstance(x, Tensor) else Tensor(x)
    # A node that saves the result saves x instead: of a parameter the parameter itself, with its version.
    return _Alias(border("_Copy", x, comm, _unchanged, _summed), x)


def reduce_from_tensor_parallel_region(x: Tensor, comm: Comm) -> Tensor:
    """g: return the sum of x over `comm`; backward passes the gradient on unchanged."""
    # Every rank has the gradient of the sum, which is that of each summand.
    return x if comm.size == 1 else border("_Reduce", x, comm, _summed, _unchanged)


def border(name: str, x: Any, comm: Comm, there: Callable[..., xp.Array], back: Callable[..., xp.Array]) -> Tensor:
    """Return a node: `there` of x, whose backward is `back` of the gradient; functions of (comm, array, why=).

    x: a tensor, or an array, which needs no gradient.
    """
    x = x if isinstance(x, Tensor) else Tensor(x)
    # A view of the gradient: nothing may be added in place to what a collective has returned.
    result, edge = there(comm, x.data, why="tensor_forward"), (x, lambda grad: grad[...])
    return record(name, result, (edge,), prepare=lambda grad: back(comm, grad, why="tensor_backward"), cost=0)


# --- the messages ---


def contiguous(x: xp.Array) -> xp.Array:
    """Return x in row-major order, copied only when it is not."""
    if x.flags.c_contiguous:
        return x
    result = xp.empty(x.shape, x.dtype, x)
    xp.copyto(result, x)
    return result


def _unchanged(comm: Comm, x: xp.Array, why: str) -> xp.Array:
    """Return x itself. Sends nothing."""
    return x


def _summed(comm: Comm, x: xp.Array, why: str) -> xp.Array:
    """Return the sum of all ranks' x, a new array; `why` is the messages' purpose."""
    # A copy, because the all-reduce works in place and x belongs to another node.
    result = xp.empty(x.shape, x.dtype, x)
    xp.copyto(result, x)
    comm.advance_clock(why)
    with purpose(why):
        all_reduce(comm, result)
    return result


class _Alias(Tensor):
    """The array of `tensor`, saved for backward as `source` would be: a parameter as itself, with its version."""

    __slots__ = ("_source",)

    def __init__(self, tensor: Tensor, source: Tensor) -> None:
        super().__init__(tensor.data)
        self.node, self._source = tensor.node, source

    def saved(self) -> Any:
        return self._source.saved()
