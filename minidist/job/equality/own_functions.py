"""Does a user's own parallel program equal the user's own one-device program? Compares what the two functions return.

    minidist compare FILE.py:train FILE.py:alone --ranks 4

    def train(comm): ...        # what one rank does; returns what it holds, whole: {"loss": ..., "weights": {...}}
    def alone(): ...            # the same on one device; returns the same names

What a function returns is a number, a text, an array, a tensor, or a list or dict of these; a list of steps is a list.
Every tensor that a rank returns is compared with the one of the same name on one device, in the order in which it was
returned. A rank need not return all of them (a stage of a pipeline has its own weights), but some rank has to.

Proved by: tests/equality/test_own_functions.py
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.user_file import load_function
from minidist.comm import SimWorld
from minidist.comm.has_run import has_run
from minidist.core.autograd import Tensor
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.job.equality.difference_patterns import NO_PATTERN, Context, distance, explain, not_finite_on_both

WHAT_TO_RETURN = (
    "return arrays, numbers or texts, or lists or dicts of them, such as {'loss': loss, 'weights': {name: p.data.copy()"
    " for name, p in model.named_parameters()}}"
)
MOST_EXPLAINED = 64  # tensors


@dataclass
class ReturnedComparison:
    """The verdict. tolerance: largest difference allowed, as a share of a tensor's largest entry; 0: bit for bit.

    max_difference: the largest of all, as such a share (infinite where a value is not finite, or not a number at all).
    first_difference: the first tensor beyond the tolerance, or None. not_finite: tensors with infinities or NaN, which
    one device has at the same places; first_not_finite: the first of them, with its first place. patterns: what the
    tensors that differ have in common, such as a factor.
    """

    tolerance: float
    ranks: int
    tensors: int = 0
    max_difference: float = 0.0
    first_difference: str | None = None
    not_finite: int = 0
    first_not_finite: str = ""
    patterns: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing is beyond the tolerance."""
        return self.first_difference is None

    def as_dict(self) -> dict[str, object]:
        """Return the dictionary that `--json` prints."""
        kept = asdict(self)
        if not self.not_finite:
            del kept["not_finite"], kept["first_not_finite"]
        if not self.patterns:
            del kept["patterns"]
        return {"equal": self.equal, **kept}

    def sentence(self) -> str:
        """Return the verdict as a sentence, with the largest difference on a separate line."""
        how = "bit for bit" if self.tolerance == 0 else f"within {self.tolerance:g} of a tensor's largest entry"
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "one rank"
        largest = f"\nlargest difference {self.max_difference:.3g} of a tensor's largest entry"
        largest = largest if self.max_difference else ""
        # What both sides do wrong is no difference.
        both = f"\n{not_finite_on_both(self.not_finite, self.first_not_finite)}" if self.not_finite else ""
        if self.equal:
            return f"equal: {ranks} and one device return the same {how}, in {self.tensors} tensors{largest}{both}"

        # A small difference may be rounding, which another order of additions explains.
        hint = ""
        if self.tolerance == 0 and 0 < self.max_difference < 1e-2:
            hint = "; if that is rounding (ranks add in another order), allow it: --tolerance 1e-3"
        patterns = "".join(f"\n{pattern}" for pattern in self.patterns)
        return f"NOT equal {how}: {self.first_difference}{patterns}{largest}{hint}{both}"


def compare_returned(
    alone: Mapping[str, Array], ranks: Sequence[Mapping[str, Array]], tolerance: float = 0.0
) -> ReturnedComparison:
    """Compare the `returned_tensors` of every rank, in rank order, with those of one device."""
    verdict = ReturnedComparison(tolerance, len(ranks))
    unlike: list[tuple[int, str, Array, Array]] = []  # rank, name, its tensor and that of one device
    different: list[str] = []
    for rank, name, actual in ((rank, *item) for rank, tensors in enumerate(ranks) for item in tensors.items()):
        what = f"{name or 'the result'} of rank {rank}"
        if name not in alone:
            wrong = f"is not returned on one device{nearest(name, alone)}; give both the same names"
        else:
            wrong = _difference(verdict, actual, alone[name], what)
            if wrong and {actual.dtype.kind, alone[name].dtype.kind} <= set("biuf"):
                unlike.append((rank, name, actual, alone[name]))
        if wrong:
            different.append(f"{what} {wrong}")

    # What no rank returns has not been compared.
    returned = {name for tensors in ranks for name in tensors}
    different += [f"{name} of one device is returned by no rank" for name in alone if name not in returned]
    verdict.first_difference = different[0] if different else None
    if unlike:
        verdict.patterns = _patterns(unlike, Context(max(8 * tolerance, 1e-6), {"the world": len(ranks)}))
    return verdict


def _patterns(unlike: Sequence[tuple[int, str, Array, Array]], context: Context) -> list[str]:
    """Return what tensors that differ have in common. unlike: rank, name, tensor, that of one device."""
    found = _explained(unlike, context)
    if sum(map(len, found.values())) == len(unlike):
        if len(found) == 1 and len(unlike) > 1:
            return [f"each of the {len(unlike)} tensors that differ is {next(iter(found))}"]
        if len(found) > 1 and (text := _factor_of_each_rank(found)):
            return [text]
    if not found and (text := _unreduced(unlike, context)):
        return [text]
    return [
        f"{name or 'the result'} of rank {rank} is {text}" + (f", and {len(more)} more are" if more else "")
        for text, ((rank, name), *more) in list(found.items())[:4]
    ]


def _factor_of_each_rank(found: Mapping[str, Sequence[tuple[int, str]]]) -> str:
    """Return a sentence if each rank's tensors have one factor and the factors of ranks differ, else ""."""
    of_rank: dict[int, set[str]] = {}
    for text, who in found.items():
        for rank, _ in who:
            of_rank.setdefault(rank, set()).add(text)
    if any(len(texts) > 1 for texts in of_rank.values()):
        return ""
    each = "; ".join(f"of rank {rank}: {text}" for rank, (text,) in sorted(of_rank.items())[:8])
    return (
        f"every tensor that differs is, {each}; the factor differs from rank to rank, as it does when a rank clips by"
        " the norm of that rank's parameters, or divides by that rank's number of tokens"
    )


def _explained(unlike: Sequence[tuple[int, str, Array, Array]], context: Context) -> dict[str, list[tuple[int, str]]]:
    """Return how the first tensors are made of the expected ones, each explanation with its tensors' ranks and names.

    Such as "2 times (the world has 2 ranks) that of one device".
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for rank, name, actual, expected in unlike[:MOST_EXPLAINED]:
        pattern = explain(actual.astype(np.float64), expected.astype(np.float64), context)[0]
        if not pattern.startswith((NO_PATTERN, "1 times ours")):  # 1 times is a difference of rounding
            found.setdefault(re.sub(r"\bours\b", "that of one device", pattern), []).append((rank, name))
    return found


def _unreduced(unlike: Sequence[tuple[int, str, Array, Array]], context: Context) -> str:
    """Return how the first tensor of one device is a sum of the ranks' ones, which no reduction has added; or ""."""
    _, first, _, expected = unlike[0]
    ours = {rank: actual.astype(np.float64) for rank, name, actual, _ in unlike if name == first}
    if len(ours) < 2 or any(actual.shape != expected.shape for actual in ours.values()):
        return ""
    basis = np.stack([actual.ravel() for actual in ours.values()], axis=1)
    weights, _, independent, _ = np.linalg.lstsq(basis, expected.astype(np.float64).ravel(), rcond=None)
    if independent < len(ours) or distance(basis @ weights, expected.astype(np.float64).ravel()) > context.tolerance:
        return ""
    terms = " + ".join(f"{weight:.4g} x rank {rank}'s" for weight, rank in zip(weights, ours, strict=True))
    return f"{first or 'the result'} of one device is {terms}: the ranks return what no reduction has added"


def _difference(verdict: ReturnedComparison, actual: Array, expected: Array, what: str) -> str:
    """Count a tensor, and return what is wrong with it, or "". what: its name and its rank."""
    verdict.tensors += 1
    if actual.shape != expected.shape:
        return (
            f"has shape {list(actual.shape)}, and {list(expected.shape)} on one device; return whole tensors (gather"
            " shards first)"
        )
    # Texts have no difference in numbers. What is not finite on both sides is no difference, and it is said.
    numeric = actual.dtype.kind in "biufc" and expected.dtype.kind in "biufc"
    both: Array = np.zeros(actual.shape, np.bool_)
    if numeric:
        both = ~np.isfinite(actual) & ((actual == expected) | (np.isnan(actual) & np.isnan(expected)))
    if both.any():
        place = tuple(np.argwhere(both)[0].tolist())
        verdict.not_finite += 1
        verdict.first_not_finite = verdict.first_not_finite or f"{what}, which is {actual[place]!s}{_at(place)}"
    if np.array_equal(actual, expected, equal_nan=numeric):
        return "" if actual.dtype == expected.dtype else f"is {actual.dtype}, and {expected.dtype} on one device"
    if not numeric:
        verdict.max_difference = float("inf")
        return f"is {quoted(actual.tolist())}, and {quoted(expected.tolist())} on one device"

    # In float64 or complex128, so that the difference of integers and booleans is one of numbers.
    wide = np.complex128 if "c" in (actual.dtype.kind, expected.dtype.kind) else np.float64
    with np.errstate(invalid="ignore"):
        gap = np.asarray(np.abs(actual.astype(wide) - expected.astype(wide)))
    gap[both] = 0.0
    gap[np.isnan(gap)] = np.inf
    rounded = (gap == 0.0) & (actual != expected) & ~both  # such as 2**53 and 2**53 + 1
    gap[rounded] = np.spacing(np.abs(expected[rounded].astype(wide)))
    place = tuple(int(index) for index in np.unravel_index(int(np.argmax(gap)), gap.shape))

    # As a share of the tensor's largest entry on one device: gradients and weights have other sizes.
    largest = float(np.max(np.abs(expected.astype(wide)), initial=0.0, where=np.isfinite(expected)))
    share = float(gap[place]) / largest if largest else float("inf")
    verdict.max_difference = max(verdict.max_difference, share)
    if share <= verdict.tolerance:
        return ""
    return f"is {actual[place]!s}{_at(place)}, and {expected[place]!s} on one device"


def _at(place: tuple[int, ...]) -> str:
    """Return a place in a tensor in words; nothing for a number."""
    return f" at {list(place)}" if place else ""


def returned_tensors(who: str, value: Any) -> dict[str, Array]:
    """Return what a function returned, by name, such as `[3].weights.layers.0.bias`.

    UsageError for a value that cannot be compared, and for one array that stands for several steps.
    """
    result = dict(_named(who, value))
    if not result:
        raise UsageError(f"{who} returns {quoted(value)}, in which there is nothing to compare; {WHAT_TO_RETURN}")

    # An array that training goes on to change would have its last value in every step.
    places: dict[tuple[str, int], str] = {}
    for name, array in result.items():
        key = re.sub(r"\[\d+\]", "[]", name), array.__array_interface__["data"][0]
        if array.size and places.setdefault(key, name) != name:
            raise UsageError(
                f"{who} returns one array as {places[key]} and as {name}, so that both have its last values; return"
                " copies: p.data.copy()"
            )
    return {name: array.copy() for name, array in result.items()}


def _named(who: str, value: Any, name: str = "") -> Iterator[tuple[str, Array]]:
    """Yield the arrays in a value, by their places."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(who, inner, f"{name}.{key}" if name else str(key))
        return
    if isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _named(who, inner, f"{name}[{i}]")
        return

    array = np.asarray(value.data if isinstance(value, Tensor) else value)
    if array.dtype.kind not in "biufcU" and array.dtype.name != "bfloat16":
        place = f" as {name}" if name else ""
        raise UsageError(f"{who} returns {quoted(value)}{place}, which cannot be compared; {WHAT_TO_RETURN}")
    yield name, array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def rank_function(source: str) -> Callable[[Comm], dict[str, Array]]:
    """Return the function of a rank, FILE.py:FUNCTION(comm), as one that returns its tensors by name."""
    function = load_function(source)
    if not _takes_comm(function, source):
        raise UsageError(
            f"{quoted_path(source, marks=False)} takes no communicator; write what a rank does as FUNCTION(comm), and"
            " give the one-device function after it"
        )

    def run(comm: Comm) -> dict[str, Array]:
        return returned_tensors(f"rank {comm.rank}", has_run(function(comm), function, comm.rank))

    return run


def alone_function(source: str) -> Callable[[], dict[str, Array]]:
    """Return the function of one device, FUNCTION() or FUNCTION(comm) with one rank, as one that returns tensors."""
    function = load_function(source)
    takes_comm = _takes_comm(function, source)

    def run() -> dict[str, Array]:
        value = SimWorld(1, timeout=0, record=False).run(function)[0] if takes_comm else function()
        return returned_tensors("one device", value)

    return run


def _takes_comm(function: Callable[..., Any], source: str) -> bool:
    """Return whether a function takes a communicator; UsageError when it needs more than that."""
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    needed = [p for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        raise UsageError(
            f"{quoted_path(source, marks=False)} takes {len(needed)} arguments; a rank's function takes one, the"
            " communicator, and one device's none"
        )
    return bool(needed)
