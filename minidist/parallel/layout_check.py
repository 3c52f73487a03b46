"""What the ranks of the tensor axis hold of a tensor: a type for each result on the tape, and an error for a wrong one.

    type         each rank has                     its gradient on each rank is        written
    invariant    the same values                   the same values                     I
    replicated   the same values                   a summand; backward must sum it     R
    varying      different values                  of different values                  V
    partial      a summand of the value            the same values                     P

A replicated parameter is I. A border of a region changes the type; at a border backward does the adjoint of forward:

    copy_to_tensor_parallel_region         I -> R      reduce_from..., row_parallel_sum          P or V -> I
    scatter_to_...                         I -> V      gather_from_tensor_parallel_region        V -> I
    gather_from_sequence_parallel_region   V -> R      reduce_scatter_to_sequence_parallel...    P or V -> V

All other operations keep the type of their inputs. I together with R or V is an error: the gradient of the I is a
summand that nobody sums, as that of a norm's weight on split rows, or of a router's on split tokens. R together with V
is V. A product over a cut dim is P. P may be added to P, scaled, cut and joined; any other use takes a summand for the
value. A sum over the ranks of what is the same on all of them counts it as often as there are ranks.

`LayoutChecker` is a watcher of the tape, so nothing is asked while it does not watch. It keeps the nodes of a step.

Source of the types: the design of meta-pytorch's spmd_types, and of shard_map in JAX ("varying manual axes").
Proved by: tests/parallel/test_layout_check.py
"""

import sys
from collections.abc import Sequence
from typing import Any

from minidist.base.watchers import Watcher
from minidist.comm.call_site import call_site
from minidist.core.autograd import Parameter
from minidist.core.base.errors import MinidistError
from minidist.core.comm import Comm

INVARIANT, REPLICATED, VARYING, PARTIAL, UNKNOWN = "I", "R", "V", "P", "?"
WORDS = {
    INVARIANT: "the same on all ranks",
    REPLICATED: "the same on all ranks, with a gradient that backward sums",
    VARYING: "different on each rank",
    PARTIAL: "a summand on each rank",
}

# Border -> (types that it takes, type that it gives), by the name of its node.
BORDERS = {
    "_Copy": (INVARIANT, REPLICATED),
    "_Reduce": (PARTIAL + VARYING, INVARIANT),
    "row_parallel_sum": (PARTIAL + VARYING, INVARIANT),
    "Scatter": (INVARIANT, VARYING),
    "Gather": (VARYING, INVARIANT),
    "_GatherSummands": (VARYING, REPLICATED),
    "_ReduceScatter": (PARTIAL + VARYING, VARYING),
    "vocab_parallel_embedding": (INVARIANT + VARYING, PARTIAL),
    "vocab_parallel_cross_entropy": (VARYING, INVARIANT),
    "vocab_parallel_distillation_loss": (VARYING, INVARIANT),
}

# Operations that are linear in all inputs of a sum: their result of summands is a summand.
LINEAR = frozenset(
    ("add", "sub", "neg", "sum", "cast", "reshape", "transpose", "swapaxes")
    + ("getitem", "concatenate", "stack", "broadcast_to")
)
PRODUCTS = ("linear", "matmul")


class LayoutError(MinidistError):
    """An operation has inputs whose types do not go together."""

    exit_code = 1


class LayoutChecker(Watcher):
    """Gives each result a type over the axis of `comm`, and raises LayoutError at the first that has none.

    boundary: the type of what enters from outside of the tape: a stage's input, a segment that is computed again.
    """

    def __init__(self, comm: Comm, axis: str = "tp", boundary: str = INVARIANT) -> None:
        self.comm, self.axis, self.boundary = comm, axis, boundary
        self.types: dict[int, tuple[Any, str]] = {}  # by the id of a node, which is kept so that its id stays its own
        self.checked = 0

    def begin_step(self) -> None:
        """Forget the nodes of the step before."""
        self.types.clear()

    def type_of(self, tensor: Any) -> str:
        """Return the type of a parameter, or of a result on the tape; data without a gradient are invariant."""
        if tensor.half:
            tensor = tensor.source
        if isinstance(tensor, Parameter):
            layout = tensor.layout
            return VARYING if layout is not None and self.axis in layout.axes else INVARIANT
        node = tensor.node
        if node is None:
            return INVARIANT
        found = self.types.get(id(node))
        return self.boundary if found is None else found[1]

    def recorded(self, name: str, out: Any, sources: Sequence[Any], cost: Any, saved: Sequence[Any]) -> None:
        """Give `out` its type; LayoutError when the sources have none together."""
        if out.node is None or self.comm.size == 1:
            return
        self.checked += 1
        name = str(name)
        inputs = [self.type_of(source) for source in sources]
        if name in BORDERS:
            result = self._border(name, inputs, sources, out)
        elif name in PRODUCTS and len(sources) > 1:
            result = self._product(name, inputs, sources, out)
        else:
            result = self._joined(name, inputs, sources, out)
        self.types[id(out.node)] = (out.node, result)

    # --- the rules ----------------------------------------------------------------------------------------------------

    def _border(self, name: str, inputs: Sequence[str], sources: Sequence[Any], out: Any) -> str:
        """Return the type that a border of a region, or another operation that sends, gives."""
        takes, gives = BORDERS[name]
        # The bias of a row-parallel sum is added once, after it.
        for kind, source in list(zip(inputs, sources, strict=True))[: 1 if name == "row_parallel_sum" else None]:
            if kind in takes or kind == UNKNOWN:
                continue
            # Neighbours hold the same shard of the key-value heads, and their gradients are summed among them.
            if name == "_Copy" and kind == VARYING and getattr(_layout(source), "copies", 1) > 1:
                return VARYING
            if PARTIAL in takes and kind in (INVARIANT, REPLICATED):
                why = (
                    f"it is the same on all ranks, so the sum is {self.comm.size} times the value: it is reduced twice"
                )
            elif kind == PARTIAL:
                why = "it is a summand on each rank: reduce it first"
            else:
                why = f"it is {WORDS[kind]}, and the operation takes what is {' or '.join(WORDS[k] for k in takes)}"
            raise self._error(name, source, why, out)
        return gives

    def _product(self, name: str, inputs: Sequence[str], sources: Sequence[Any], out: Any) -> str:
        """Return the type of x W, or x W + b: a summand where the dim that is summed over is cut."""
        x, weight = sources[0], sources[1]
        layout = _layout(weight)
        if inputs[0] == VARYING and layout is not None and self.axis in layout.axes:
            cut = layout.dims[layout.axes.index(self.axis)]
            # The dim of W that meets the columns of x; of a square shard it may be either, and x decides.
            if weight.shape[cut] == x.shape[-1]:
                return PARTIAL
        return self._joined(name, inputs, sources, out)

    def _joined(self, name: str, inputs: Sequence[str], sources: Sequence[Any], out: Any) -> str:
        """Return the type that all inputs have together, for an operation that sends nothing."""
        kinds = set(inputs)
        if UNKNOWN in kinds:
            return UNKNOWN
        if PARTIAL in kinds:
            return self._with_summands(name, inputs, sources, out)
        if INVARIANT in kinds and kinds & {REPLICATED, VARYING}:
            # Data without a gradient, such as a mask, have no summand that could be lost.
            held = [s for kind, s in zip(inputs, sources, strict=True) if kind == INVARIANT and s.node is not None]
            if held:
                why = (
                    "it is used with values that differ between the ranks, so its gradient on each rank is a summand"
                    " that nothing sums: pass copy_to_tensor_parallel_region on its way in"
                )
                raise self._error(name, held[0], why, out)
        return next((kind for kind in (VARYING, REPLICATED) if kind in kinds), INVARIANT)

    def _with_summands(self, name: str, inputs: Sequence[str], sources: Sequence[Any], out: Any) -> str:
        """Return the type of an operation with a summand among its inputs: it must be linear in the summands."""
        if name in LINEAR:
            others = [source for kind, source in zip(inputs, sources, strict=True) if kind != PARTIAL]
            if others:
                why = f"it is added to summands, so it counts {self.comm.size} times: add it after the reduction"
                raise self._error(name, others[0], why, out)
        elif name not in ("mul", "div") or not set(inputs) <= {PARTIAL, INVARIANT}:
            source = sources[list(inputs).index(PARTIAL)]
            raise self._error(name, source, "it is a summand on each rank: reduce it before this operation", out)
        return PARTIAL

    def _error(self, name: str, source: Any, why: str, out: Any) -> LayoutError:
        """Return the error that names the operation, the tensor with its shape and type, and the user's line."""
        source = source.source if source.half else source
        called = f"parameter {source.name!r}" if isinstance(source, Parameter) else "the input"
        kind = self.type_of(source)
        where = f"over {self.axis} ({self.comm.size} ranks), at {call_site(sys._getframe(2))}"
        return LayoutError(
            f"rank {self.comm.members[self.comm.rank]}: {name.lstrip('_')} of {called} of shape {tuple(source.shape)},"
            f" {kind} {where}: {why}; its result has the shape {tuple(out.shape)}"
        )


def _layout(tensor: Any) -> Any:
    """Return the layout of a parameter; None for one that is whole, and for other tensors."""
    tensor = tensor.source if tensor.half else tensor
    return tensor.layout if isinstance(tensor, Parameter) else None
