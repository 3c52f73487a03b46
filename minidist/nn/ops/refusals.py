"""What operations, losses and parameters refuse, apart from shapes that do not fit.

Proved by: tests/autograd/test_fused.py, tests/autograd/test_refusals.py
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from minidist.base.errors import AutogradError, DtypeError, ShapeError, UsageError, quoted, reason
from minidist.base.limits import check_number
from minidist.core.autograd.parameter import Parameter
from minidist.core.autograd.tensor import Tensor
from minidist.core.base import arrays as xp

Shape = tuple[int, ...]


def refuse_logits(logits: Any) -> None:
    """Raise AutogradError: the logits are no Tensor."""
    raise AutogradError(
        f"cross_entropy: the logits are a value of type {type(logits).__name__}, through which no gradient gets;"
        " pass the Tensor that the model computes (Tensor(logits) where no gradient is wanted)"
    )


def refuse_dtype(name: str, targets: xp.Array) -> None:
    """Raise AutogradError: the targets are no integers."""
    raise AutogradError(f"{name}: targets must be integers, not {targets.dtype}")


def check_range(name: str, targets: xp.Array, counted: xp.Array, classes: int) -> None:
    """Raise AutogradError for a target that counts and is no class."""
    wrong = targets[counted & ((targets < 0) | (targets >= classes))]
    if wrong.size:
        raise AutogradError(f"{name}: target {int(wrong[0])} is out of range: classes are 0..{classes - 1}")


def refuse_words(rank: int, indices: xp.Array, words: int) -> None:
    """Raise UsageError: not all indices are words of a vocabulary that ranks have split."""
    worst = int(indices.min() if indices.min() < 0 else indices.max())
    raise UsageError(f"rank {rank}: word {worst} is out of range: the vocabulary has words 0..{words - 1}")


def check_split_targets(name: str, rank: int, logits: Any, targets: xp.Array, ignore_index: int, words: int) -> None:
    """Raise what `cross_entropy` raises for these logits, and UsageError for a target outside the vocabulary.

    words: the size of the vocabulary, which ranks have split. A target of ignore_index does not count.
    """
    if not isinstance(logits, Tensor):
        refuse_logits(logits)
    if targets.shape != logits.shape[:-1]:
        raise ShapeError(f"{name}: targets of shape {targets.shape} for logits of shape {logits.shape}")
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= words))]
    if wrong.size:
        raise UsageError(
            f"rank {rank}: target {int(wrong[0])} is out of range: the vocabulary has words 0..{words - 1}"
        )


def check_ring(comm: Any, q: Shape, k: Shape, v: Shape, rows: Sequence[int], length: int) -> None:
    """Raise ShapeError for queries, keys and values of ring attention that do not fit; rows: of each rank."""
    n = rows[comm.rank]
    if len(q) != 4 or q[1] != n or k != v or k[1] != n or q[2] % k[2]:
        raise ShapeError(
            f"ring attention: q {q}, k {k}, v {v}; rank {comm.rank} of {comm.size} holds {n} of {length} tokens:"
            f" (batch, {n}, heads, size), with heads a multiple of k's"
        )


def check_divisor(name: str, divisor: Any) -> float:
    """Return a loss's divisor as a float; raise UsageError for 0, a negative, infinite or NaN one, and for True."""
    try:
        number = divisor.item() if xp.is_array(divisor) and divisor.size == 1 else divisor
        return check_number("divisor", number, above=0)
    except UsageError:
        raise UsageError(
            f"{name}: divisor={quoted(divisor)}; give the number of rows (tokens) that all ranks and micro-batches"
            " count in this step, a finite number above 0"
        ) from None


def refuse_indices(indices: xp.Array, weight: Parameter) -> None:
    """Raise AutogradError: not all indices are integers that name a row of the weight."""
    if indices.dtype.kind not in "iu":
        raise AutogradError(f"embedding: indices must be integers, not {indices.dtype}")
    worst = int(indices.min() if indices.min() < 0 else indices.max())
    raise AutogradError(
        f"embedding: index {worst} is out of range: the weight of shape {weight.shape} has rows"
        f" 0..{weight.shape[0] - 1}"
    )


def refuse_index(x: Tensor, index: Any, error: IndexError) -> None:
    """Raise ShapeError: NumPy has refused the index of a tensor with this error."""
    raise ShapeError(f"getitem: index {quoted(index)} does not fit shape {x.shape} ({reason(error)})") from None


def refuse_mean(x: Tensor) -> None:
    """Raise DtypeError: integers have no mean that is one."""
    raise DtypeError(f"mean: a tensor of {x.dtype} has no mean of its dtype; cast it to a float dtype first")


def refuse_integers(x: Tensor) -> None:
    """Raise DtypeError: a tensor of integers has no gradient."""
    if isinstance(x, Parameter):
        raise DtypeError(
            f"parameter {x.name!r} is {x.dtype}: only floats have gradients; use requires_grad=False, or cast it"
        )
    raise DtypeError(f"requires_grad=True for a tensor of {x.dtype}: only floats have gradients; cast it first")


def check_values(parameter: Parameter, value: xp.Array) -> None:
    """Raise an error for new values of a parameter in a flat array that have another dtype, or would be lost."""
    if value.dtype != parameter.dtype:
        raise DtypeError(
            f"parameter {parameter.name!r} is {parameter.dtype} in a flat array; cannot assign data of {value.dtype}"
        )
    # What is whole of a sharded parameter is a copy, and the next gather would undo the change.
    shard = parameter.flat.shard
    if shard is not None and shard.own is not None:
        raise AutogradError(
            f"parameter {parameter.name!r} is sharded, and a change of the gathered copy would be lost; set the values"
            " before fully_shard, or change this rank's part, the `data` of shards_of(model)"
        )


def check_gradients(
    name: str, gradients: Sequence[Any], shapes: Sequence[tuple[int, ...]], needed: Sequence[bool]
) -> None:
    """Raise an error unless a user's backward has returned a gradient of the right shape for each argument in need."""
    if len(gradients) != len(shapes):
        raise AutogradError(f"{name}.backward returned {len(gradients)} gradients for {len(shapes)} tensor arguments")
    for i, (gradient, shape) in enumerate(zip(gradients, shapes, strict=True)):
        if needed[i] and gradient is None:
            raise AutogradError(f"{name}.backward gave no gradient for tensor argument {i}, which needs one")
        if needed[i] and gradient.shape != shape:
            raise ShapeError(f"{name}.backward: gradient {i} has shape {gradient.shape}; the argument has {shape}")


def refuse_backward(tensor: Tensor, weight_gradients: Any) -> NoReturn:
    """Raise AutogradError for an unknown mode, a tensor without a graph, or several elements without a gradient."""
    if weight_gradients not in ("now", "deferred"):
        raise AutogradError(f"weight_gradients must be 'now' or 'deferred', not {quoted(weight_gradients)}")
    if tensor.node is None:
        raise AutogradError(
            f"backward from a tensor of shape {tensor.shape} that needs no gradient: nothing in it is trained"
        )
    shape = tensor.data.shape
    raise AutogradError(f"backward from a tensor of shape {shape} needs gradient=; only one element can do without")


def refuse_freed(node: Any) -> NoReturn:
    """Raise AutogradError: an earlier backward has gone through this node."""
    raise AutogradError(
        f"second backward through {node.name!r}: the first one freed what it saved; run the forward again"
    )


def released(owner: Any) -> AutogradError:
    """Return the error of reading a parameter, or the values of flat parameters, while they are released."""
    read = "read this rank's part from shards_of(model), or all parts with gather_tensors(shards_of(model), optimizer)"
    if not isinstance(owner, Parameter):
        return AutogradError(f"the values of {owner.unit} are released; {read}")
    return AutogradError(
        f"parameter {owner.name!r} of shape {owner.shape} is released: the module that it was sharded with is not"
        f" computing now; call that module itself (not a part of it), {read}"
    )
