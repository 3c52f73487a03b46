"""Recomputation: keep a segment's inputs instead of everything inside it, and run it again in backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. The replay runs in the context captured at forward
(batch coordinates, message purpose, ...) and counts calls from the same numbers, so dropout draws the same masks, and
a segment that communicates replays the same collectives in the same order on all ranks.

Proved by: tests/autograd/test_extending.py, tests/nn/test_recompute.py
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from operator import itemgetter
from typing import Any, cast

from minidist.base import arrays as xp
from minidist.base.coordinates import running_batch
from minidist.base.watchers import Watcher, watchers, watching
from minidist.core.autograd.backward import BackwardPass, current_pass
from minidist.core.autograd.parameter import Parameter
from minidist.core.autograd.tensor import (
    Node,
    Tensor,
    is_grad_enabled,
    no_grad,
    record,
    saved_tensors,
    set_grad_enabled,
)
from minidist.core.base.errors import AutogradError


class _Segment(Watcher):
    """Notes which parameters a segment reads in its forward, and refuses tensors from outside that need a gradient."""

    def __init__(self) -> None:
        self.reads: list[Parameter] = []

    def parameter_read(self, parameter: Parameter) -> None:
        self.reads.append(parameter)

    def recorded(self, name: str, out: Any, sources: Sequence[Any], cost: Any, saved: Sequence[Any]) -> None:
        """The segment's arguments have no node in its forward, so an input with a node is from outside."""
        if not is_grad_enabled():
            for source in sources:
                if source.node.__class__ is Node:
                    raise AutogradError(
                        f"checkpoint: {name} reads a tensor of shape {source.shape} that needs a gradient and is not an"
                        " argument of the function; pass it as an argument, or detach() it"
                    )


def checkpoint(fn: Callable[..., Any], *args: Any, pack: Callable[[xp.Array], Any] | None = None) -> Any:
    """Return fn(*args), saving only the tensors among the arguments.

    fn must be repeatable and return a tensor or a tuple of tensors.

    pack: makes of a tensor argument's array what is kept instead: an object whose `.data` is read once, in backward,
    and gives the array again (from the host, say).

    Costs one more forward of the segment. Parameters that fn uses get their gradients during the replay; they become
    ready as they would without recomputation, counting every segment that uses them. Any other tensor that
    needs a gradient must be an argument: one that fn finds elsewhere is an error.
    """
    if not is_grad_enabled():
        return fn(*args)
    context, calls = copy_context(), snapshot_calls()
    with watching(_Segment()) as segment, no_grad():
        result = fn(*(Tensor(a.data) if isinstance(a, Tensor) and not isinstance(a, Parameter) else a for a in args))
    outputs = _tensors(result)
    used = tuple(p for p in dict.fromkeys(segment.reads) if p.requires_grad)
    sources = [a for a in args if isinstance(a, Tensor)]
    kept = [_kept(a, pack) for a in args]

    def replay(g: Any) -> list[xp.Array]:
        running, told = cast(BackwardPass, current_pass()), watchers.get()  # now, in backward
        inputs = [Tensor(a.data, needs) if is_tensor else a for a, needs, is_tensor in kept]

        def forward() -> Any:
            watchers.set(told)
            saved_tensors.set(None)  # what the replay saves is read in a moment
            with set_grad_enabled(True), replay_calls(calls):
                return fn(*inputs)

        again = context.copy().run(forward)
        node = again.node if isinstance(again, Tensor) else _joined(again, arrived)
        del again  # the values are not needed a second time
        # The recomputed graph is visited in the same pass; this node no longer counts as a use of its parameters.
        tape = [] if node is None else running.collect(node)
        for parameter in used:
            running.site_done(parameter)
        if node is not None:
            running.visit(node, g, tape)
        leaves = [leaf for leaf, (_, _, is_tensor) in zip(inputs, kept, strict=True) if is_tensor]
        return [xp.zeros_like(leaf.data) if leaf.grad is None else leaf.grad for leaf in leaves]

    arrived: dict[int, xp.Array] = {}  # gradients of a tuple's tensors, by their place
    several = isinstance(result, tuple)
    data = xp.zeros((), outputs[0].dtype, outputs[0].data) if several else result.data
    tensor = record("checkpoint", data, [(s, itemgetter(i)) for i, s in enumerate(sources)], prepare=replay, cost=0)
    _set_replays(tensor, used, replay)
    return tuple(_output(tensor, i, output.data, arrived) for i, output in enumerate(outputs)) if several else tensor


def _set_replays(tensor: Tensor, used: tuple[Parameter, ...], replay: Callable[..., Any]) -> None:
    """Note on the node which parameters the replay reads; they need it also where no argument needs a gradient."""
    if used:
        tensor.node = tensor.node or Node("checkpoint", prepare=replay)
        tensor.node.replays = used


def _tensors(result: Any) -> tuple[Tensor, ...]:
    """Return what a segment returned, as a tuple; AutogradError for anything but tensors."""
    outputs = result if isinstance(result, tuple) else (result,)
    for output in outputs:
        if not isinstance(output, Tensor):
            raise AutogradError(
                f"checkpoint: the function must return a Tensor or a tuple of Tensors, not {type(output).__name__}"
            )
    return outputs


def _kept(argument: Any, pack: Callable[[xp.Array], Any] | None) -> tuple[Any, bool, bool]:
    """Return what is kept of an argument until backward, whether it needs a gradient, and whether it is a tensor."""
    if not isinstance(argument, Tensor):
        return argument, False, False
    return argument.saved() if pack is None else pack(argument.data), argument.requires_grad, True


def _output(segment: Tensor, place: int, data: xp.Array, arrived: dict[int, xp.Array]) -> Tensor:
    """One of several outputs, whose gradient waits in `arrived` until those of all outputs have been visited."""

    def arrive(g: xp.Array) -> xp.Array:
        arrived[place] = g
        return xp.zeros_like(segment.data)

    return record("checkpoint output", data, [(segment, arrive)], cost=0)


def _joined(outputs: tuple[Tensor, ...], arrived: dict[int, xp.Array]) -> Node | None:
    """A root above those outputs of a replay whose gradients have arrived."""

    def take(place: int) -> Callable[[Any], xp.Array]:
        # A view, which backward never adds to in place: the array may be shared.
        return lambda _: arrived.pop(place)[...]

    edges = [(output.node, take(i)) for i, output in enumerate(outputs) if output.node is not None and i in arrived]
    return Node("checkpoint outputs", tuple(edges)) if edges else None


def snapshot_calls() -> dict[str, int] | None:
    """The call counts now, for `replay_calls`; None outside `batch_coordinates`."""
    coordinates = running_batch.get()
    return None if coordinates is None else dict(coordinates.calls)


@contextmanager
def replay_calls(calls: dict[str, int] | None) -> Iterator[None]:
    """Inside the block modules count their calls from `calls` again, so that recomputation draws the same masks."""
    coordinates = running_batch.get()
    if coordinates is None or calls is None:
        yield
        return
    token = running_batch.set(replace(coordinates, calls=dict(calls)))
    try:
        yield
    finally:
        running_batch.reset(token)
