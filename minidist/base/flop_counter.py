"""Floating-point operations and bytes moved, of every recorded operation.

Proved by: tests/autograd/test_extending.py, tests/autograd/test_deferred_and_recorded.py
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minidist.base.watchers import Watcher, current

Cost = tuple[int, list[tuple[int, int]]]  # (flops, [(flops, bytes) of each vjp])


def _linear(out: Any, x: Any, weight: Any, *biases: Any) -> Cost:
    flops, nbytes = 2 * out.size * x.shape[-1], out.data.nbytes
    product = (flops, x.stored.nbytes + weight.stored.nbytes + nbytes)
    return flops, [product, product] + [(out.size, nbytes)] * len(biases)


def _causal_attention(out: Any, qkv: Any) -> Cost:
    batch, length, width = out.shape
    flops = 2 * batch * length * length * width  # half of 2 products of 2 batch T T D
    return flops, [(flops * 5 // 2, 2 * qkv.stored.nbytes + 2 * out.data.nbytes)]  # backward has five products, not two


# What operations cost whose products in backward are not those of forward: see `cost` of `record`.
COSTS: dict[str, Callable[..., Cost]] = {"linear": _linear, "causal_attention": _causal_attention}


class FlopCounter(Watcher):
    """Counts (flops, bytes) of each operation while it is the current counter.

    Each operation adds one entry in forward, and in backward one for each input gradient and one for each weight
    gradient that it computes. Bytes are those read and written if nothing stays in a cache. `totals` has the sums of
    "forward", "input_gradient" and "weight_gradient" since the counter was made.

        with FlopCounter() as counter:
            loss = model(batch)
            comm.compute(operations=counter.take())
    """

    def __init__(self) -> None:
        self.operations: list[tuple[int, int]] = []
        self.totals: dict[str, tuple[int, int]] = {}

    def add(self, kind: str, flops: int, nbytes: int) -> None:
        """Count one operation of `kind`."""
        self.operations.append((flops, nbytes))
        total_flops, total_bytes = self.totals.get(kind, (0, 0))
        self.totals[kind] = (total_flops + flops, total_bytes + nbytes)

    counted = add  # of an operation that is not recorded

    def take(self) -> list[tuple[int, int]]:
        """The (flops, bytes) since the last take, in order of execution; the list starts anew."""
        operations, self.operations = self.operations, []
        return operations

    def recorded(self, name: str, out: Any, sources: Sequence[Any], cost: Any, saved: Sequence[Any]) -> None:
        """Count the forward, and note on the node what its vector-Jacobian products will cost."""
        if cost is None and name in COSTS:
            cost = partial(COSTS[name], out, *sources)
        flops, of_vjps = cost() if callable(cost) else (out.size if cost is None else cost, None)
        nbytes = out.data.nbytes
        for source in sources:
            nbytes += source.stored.nbytes
        self.add("forward", flops, nbytes)
        if out.node is not None:
            each = [(flops, nbytes)] * len(sources) if of_vjps is None else of_vjps
            # In the order of the node: inputs, then parameters. A frozen input costs nothing.
            parameters, of_inputs, of_parameters = dict(out.node.weights), list[Any](), list[Any]()
            for source, of_vjp in zip(sources, each, strict=True):
                if source.node is not None:
                    (of_parameters if source.node in parameters else of_inputs).append(of_vjp)
            out.node.costs = of_inputs + of_parameters

    def input_gradient(self, gradient: Any, cost: tuple[int, int] | None) -> None:
        """Count it; nothing is known of an operation that was recorded before the counter."""
        self.add("input_gradient", *(cost or (0, 0)))

    def weight_gradient(self, cost: tuple[int, int] | None) -> None:
        """Count it, if the operation was recorded with the counter."""
        if cost is not None:
            self.add("weight_gradient", *cost)


current_flop_counter = partial(current, FlopCounter)  # the counter of the innermost `with FlopCounter()`, or None
