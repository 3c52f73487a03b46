"""Why do two gradients differ? A wrong one is often the right one, changed in a simple way.

Each pattern below proposes a tensor made of ours; it holds when theirs is that tensor within the tolerance.

    factor          all elements n times, or 1/n of ours            a sum in place of a mean, a loss scale
    rows            a sum of other multiples of the rows' gradients  a rank's rows alone, a micro-batch that is missing
    stale           our gradient of the batch before                 an update with the gradients of the last step
    one shard       ours on a part of one dim, zeros elsewhere       a gather, or a reduction of one shard, is missing
    transposed      ours with the last two dims exchanged            a Conv1D's weight in place of a Linear's
    rotary halves   rows of each head in pairs instead of halves     the two forms of RoPE
    heads           the heads in another order, or two exchanged     fused matrices that are cut in another order

The gradient of a batch is the sum of its rows' gradients, so one least-squares fit finds factors, missing rows and
partial sums: theirs = c_1 g_1 + ... + c_R g_R with g_r the gradient of row r, divided as the whole batch is.

Proved by: tests/equality/test_difference_patterns.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from minidist.base.errors import ranges_text

NO_PATTERN = "no known pattern"
MOST_FACTOR = 4096  # a larger one is not recognised


@dataclass(frozen=True)
class Context:
    """What a pattern may use in addition to the two tensors.

    tolerance: of the relative distance. mesh: sizes of the axes, which explain factors. rows: our gradient of each row
    of the batch. before: our gradient of the batch before. heads: of this tensor along dim `axis`, 0 for none. parts:
    lie one after the other along that dim, each with all heads: queries, keys and values where there are 3.
    """

    tolerance: float
    mesh: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[np.ndarray] = ()
    before: np.ndarray | None = None
    heads: int = 0
    axis: int = 0
    parts: int = 1


Pattern = Callable[[np.ndarray, np.ndarray, Context], str]


def distance(theirs: np.ndarray, ours: np.ndarray) -> float:
    """Return the norm of the difference over the norm of ours; infinity for unequal shapes and values not finite."""
    if theirs.shape != ours.shape or not (np.isfinite(theirs).all() and np.isfinite(ours).all()):
        return float("inf")
    size = float(np.linalg.norm(ours))
    difference = float(np.linalg.norm(theirs - ours))
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def not_finite(theirs: np.ndarray, ours: np.ndarray) -> str:
    """Return where the first value is that is not finite on one side or both, with both values, and how many there are.

    The arrays have one shape, or only those of `theirs` are named. "" where all values are finite.
    """
    wrong = ~np.isfinite(theirs) | (~np.isfinite(ours) if ours.shape == theirs.shape else False)
    if not wrong.any():
        return ""
    place = tuple(np.argwhere(wrong)[0].tolist())
    expected = f", ours is {ours[place]}" if ours.shape == theirs.shape else ""
    where = f"the element at {list(place)} is {theirs[place]}{expected}"
    return f"{where}; {int(wrong.sum())} of {theirs.size} elements are not finite"


def not_finite_on_both(count: int, first: str) -> str:
    """Return the clause about tensors that are not finite on both sides, which is no difference. first: of them."""
    return f"{count} tensors are not finite at the same places on both sides, first {first}"


def explain(theirs: np.ndarray, ours: np.ndarray, context: Context) -> list[str]:
    """Return what describes the difference: every pattern that holds, or one sentence with the distance."""
    if not (np.isfinite(theirs).all() and np.isfinite(ours).all()):
        return [f"not finite: {not_finite(theirs, ours)}"]
    if not theirs.any() and ours.any():
        return ["all zeros"]
    found = [sentence for pattern in PATTERNS if (sentence := pattern(theirs, ours, context))]
    if found:
        return found
    if theirs.shape != ours.shape:
        return [f"of shape {theirs.shape}, and ours is {ours.shape}"]
    cosine = float(np.vdot(theirs, ours)) / (float(np.linalg.norm(theirs) * np.linalg.norm(ours)) or 1.0)
    return [f"{NO_PATTERN}: relative distance {distance(theirs, ours):.3g}, cosine {cosine:.4f}"]


def factor(theirs: np.ndarray, ours: np.ndarray, context: Context) -> str:
    """Return "n times ours" or "ours divided by n", with the axes of that size."""
    if theirs.shape != ours.shape or not ours.any():
        return ""
    ratio = float(np.vdot(ours, theirs)) / float(np.vdot(ours, ours))
    if distance(theirs, ratio * ours) > context.tolerance or ratio == 0:
        return ""
    return _times(ratio, context.mesh, context.tolerance) + " ours"


def rows(theirs: np.ndarray, ours: np.ndarray, context: Context) -> str:
    """Return which rows of the batch count how often."""
    count = len(context.rows)
    if count < 2 or theirs.shape != ours.shape:
        return ""
    basis = np.stack([row.ravel() for row in context.rows], axis=1)
    multiples, _, rank, _ = np.linalg.lstsq(basis, theirs.ravel(), rcond=None)
    if rank < count or distance(theirs.ravel(), basis @ multiples) > context.tolerance:
        return ""

    # The fit magnifies rounding where rows are nearly equal, so multiples are rounded only when this gives theirs, too.
    rounded = np.round(multiples * 64) / 64
    if distance(theirs.ravel(), basis @ rounded) <= context.tolerance:
        multiples = rounded
    return _counted(multiples, context)


def _counted(multiples: np.ndarray, context: Context) -> str:
    """Return how often each row counts; "" where all count equally."""
    count = len(multiples)
    missing = [r for r in range(count) if abs(multiples[r]) < 1e-2]
    present = [r for r in range(count) if r not in missing]
    if not present or np.ptp(multiples) < 1e-2:
        return ""
    if np.ptp(multiples[present]) < 1e-2:
        times = _times(float(multiples[present[0]]), context.mesh, 1e-2)
        what = "" if times == "1 times" else f"{times} "
        return f"{what}the gradient of rows {ranges_text(present)} of {count}; rows {ranges_text(missing)} are missing"
    listed = ", ".join(f"{value:.3g}" for value in multiples)
    return f"rows of the batch count differently: {listed} times"


def stale(theirs: np.ndarray, ours: np.ndarray, context: Context) -> str:
    """Return whether theirs is our gradient of the batch before."""
    if context.before is None or distance(theirs, context.before) > context.tolerance:
        return ""
    return "our gradient of the batch before: stale by one step"


def one_shard(theirs: np.ndarray, ours: np.ndarray, context: Context) -> str:
    """Return the part of one dimension that is not zero, if the rest of that dimension is zero."""
    if theirs.shape != ours.shape:
        return ""
    for dim in range(theirs.ndim):
        used = np.flatnonzero(np.any(theirs != 0, axis=tuple(d for d in range(theirs.ndim) if d != dim)))
        if not used.size:
            return ""
        first, stop = int(used[0]), int(used[-1]) + 1
        part = (slice(None),) * dim + (slice(first, stop),)
        if stop - first < theirs.shape[dim] and distance(theirs[part], ours[part]) <= context.tolerance:
            return f"ours in {first}:{stop} of dim {dim} (of {theirs.shape[dim]}), zeros elsewhere: one shard only"
    return ""


def transposed(theirs: np.ndarray, ours: np.ndarray, context: Context) -> str:
    """Return whether the last two dims are exchanged."""
    if ours.ndim < 2 or distance(theirs, ours.swapaxes(-1, -2)) > context.tolerance:
        return ""
    return "ours, transposed"


def rotary_halves(theirs: np.ndarray, ours: np.ndarray, context: Context) -> str:
    """Return whether rows of each head lie as pairs where ours lie as halves, or the other way round."""
    count, size = context.heads, ours.shape[0] if ours.ndim else 0
    if not (count and size) or context.axis or context.parts > 1:
        return ""
    if theirs.shape != ours.shape or size % (2 * count):
        return ""
    halves, pairs = (count, 2, size // count // 2), (count, size // count // 2, 2)
    for shape, words in ((halves, "pairs (2i, 2i+1)"), (pairs, "halves (i, i + n/2)")):
        other = ours.reshape(*shape, *ours.shape[1:]).swapaxes(1, 2).reshape(ours.shape)
        if distance(theirs, other) <= context.tolerance:
            return f"ours with the rows of each head as {words}: the other form of rotary positions"
    swapped = ours.reshape(*halves, *ours.shape[1:])[:, ::-1].reshape(ours.shape)
    return "ours with the halves of each head swapped" if distance(theirs, swapped) <= context.tolerance else ""


def _has_heads(theirs: np.ndarray, ours: np.ndarray, context: Context) -> bool:
    """Return whether both tensors have several heads, in parts of equal size."""
    if context.heads < 2 or theirs.shape != ours.shape or ours.ndim <= max(context.axis, 0):
        return False
    return not ours.shape[context.axis] % (context.heads * context.parts)


def _nearest(heads_of: np.ndarray, blocks: np.ndarray) -> list[int]:
    """Return the number of the head that each block is most like."""
    return [int(np.argmin([np.linalg.norm(block - head) for head in heads_of])) for block in blocks]


def heads(theirs: np.ndarray, ours: np.ndarray, context: Context) -> str:
    """Return in which order the heads lie, or which two are exchanged, and in which parts of a fused matrix."""
    count, parts = context.heads, context.parts
    if not _has_heads(theirs, ours, context):
        return ""
    mine, other = (np.moveaxis(a, context.axis, 0).reshape(parts, count, -1) for a in (ours, theirs))
    straight = list(range(count))
    found = [_nearest(heads_of, blocks) for heads_of, blocks in zip(mine, other, strict=True)]
    # Of a part that is nothing but rounding, such as a key bias, any order fits: another part's is tried for all.
    for order in (order for order in found if sorted(order) == straight != order):
        for orders in ([order] * parts, [order if own == order else straight for own in found]):
            permuted = np.stack([heads_of[own] for heads_of, own in zip(mine, orders, strict=True)])
            if distance(other, permuted) <= context.tolerance:
                return _ordered(order, [i for i in range(parts) if orders[i] == order] if parts > 1 else [])
    return ""


def _ordered(order: Sequence[int], parts: Sequence[int]) -> str:
    """Return an order of heads in words, with the parts of a fused matrix in which it is."""
    names = [("queries", "keys", "values")[i] for i in parts]
    where = f" in the {', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}" if names else ""
    moved = [head for place, head in enumerate(order) if place != head]
    if len(moved) > 2:
        return f"ours with the heads in the order {', '.join(map(str, order))}{where}"
    first, second = sorted(moved)
    return (
        f"ours with heads {first} and {second} exchanged{where}: give them one order wherever this tensor is cut or"
        " joined by heads"
    )


PATTERNS: tuple[Pattern, ...] = (factor, rows, stale, one_shard, transposed, rotary_halves, heads)


def _times(ratio: float, mesh: Mapping[str, int], tolerance: float) -> str:
    """Return a factor in words, with the axes that have this size: "2 times (tp)"."""
    sign, size = ("minus " if ratio < 0 else ""), abs(ratio)
    n = round(size) if size >= 1 else round(1 / size)
    if not 1 <= n <= MOST_FACTOR or abs((size if size >= 1 else 1 / size) - n) > max(tolerance, 1e-3) * n:
        return f"{ratio:.6g} times"
    names = [axis for axis, ranks in mesh.items() if ranks == n and n > 1]
    why = f" ({' or '.join(names)} has {n} ranks)" if names else ""
    if n == 1:
        return f"{sign}1 times"
    return f"{sign}{n} times{why}" if size >= 1 else f"{sign}1/{n} of{why}"
