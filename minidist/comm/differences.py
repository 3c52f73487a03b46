"""The sentences about two sides of a message that differ in their operation, its arguments, or their replicas.

Imported when two headers have differed.

Proved by: tests/comm/test_header.py, tests/comm/test_remedies.py
"""

import re
from typing import NamedTuple

from minidist.core.base.errors import MismatchError

_ARGUMENTS = re.compile(
    r"(?: (?!root |counts )(\w+))?(?: root (\d+))?(?: counts (\[[\d, ]*\]|#[0-9a-f]+))?(?: (\[[\d, ]*\]))?"
)


class Arguments(NamedTuple):
    """What every rank must pass equal to a collective: as text, "" where there is none."""

    reduction: str
    root: str
    counts: str
    shape: str


def arguments_of(operation: str) -> Arguments | None:
    """Return the arguments in an operation such as "reduce/ring max root 1 [2, 3]"; None when it has others."""
    found = _ARGUMENTS.fullmatch(operation[operation.find(" ") :])
    return Arguments(*(text or "" for text in found.groups())) if found and " " in operation else None


def without_shape(operation: str) -> str:
    """Return "reduce/ring max root 1" of "reduce/ring max root 1 [2, 3]"."""
    found = arguments_of(operation)
    return operation.removesuffix(f" {found.shape}") if found and found.shape else operation


_MEANS = re.compile(r", mean over (\d+ \w+(?: \+ \d+ \w+)*)")


def compare_replicas(operation: str, theirs: tuple[int, str | None], ours: tuple[int, str], where: str) -> None:
    """Raise MismatchError when two replicas differ; they say what they are: "model 1 after 3 updates with lr 0.1".

    theirs, ours: rank of the sender, and of the receiver, and what it says; None where the sender says no such thing.
    """
    (source, other), (destination, mine) = theirs, ours
    if other == mine:
        return

    # Means over other numbers of rows, and nothing else that differs.
    over = [_MEANS.search(text) if text else None for text in (mine, other)]
    if other and any(over) and _MEANS.sub("", mine) == _MEANS.sub("", other):
        sites = where.removesuffix(" (receiver)").split(" (sender) and ")
        if operation.startswith("all_gather") and not all(over) and len(sites) == 2:
            passes = [(destination, sites[1]), (source, sites[0])]  # as in `over`
            (late, there), (early, here) = passes if over[0] else passes[::-1]
            raise MismatchError(
                f"ranks differ in {operation}: rank {late} is in the backward pass ({there}) and rank {early} in a"
                f" forward pass ({here}): every rank must call backward() after each forward"
            )
        has = [f"the mean over {found[1]}" if found else "no mean over rows" for found in over]
        raise MismatchError(
            f"ranks differ in {operation}: the loss of rank {destination} is {has[0]}, and that of rank {source}"
            f" {has[1]}, at {where}; the mean of the ranks' means is not the mean over all rows: divide every loss"
            " by the rows (tokens) of all ranks (divisor=), and wrap the model with reduction='sum'"
        )
    raise MismatchError(
        f"ranks differ in {operation}: rank {destination} has {mine}, and rank {source}"
        f" {other or 'something else'}, at {where}; every rank must run its models in the same order,"
        " step their optimizers as often and with the same settings, call the same of train() and eval(), and give the"
        f" same values to the weights{' and as many rows to a mean that is averaged' if any(over) else ''}"
    )


def unlike_operations(sent: str, expected: str) -> tuple[str, str]:
    """Return what differs between two operations with their arguments, and the remedy."""
    # The operation, then the algorithm.
    ours, theirs = (text.partition(" ")[0] for text in (sent, expected))
    if ours != theirs:
        if ours.partition("/")[0] == theirs.partition("/")[0]:
            return "algorithms differ", "every rank must pass the same algorithm"
        return "operation mismatch", "every rank of a communicator must call the same collectives in the same order"

    # What a call that sends nothing compares: see `communicator.check_alike`.
    if sent.split(" ")[1:2] == expected.split(" ")[1:2] == ["weights"]:
        return "weights differ", "every rank must build the whole model from the same seed, or load the same weights"

    # One argument is named; of several that differ any may be the cause.
    a, b = (Arguments("", "", "", "") if " " not in text else arguments_of(text) for text in (sent, expected))
    unlike = [] if a is None or b is None else [name for name in a._fields if getattr(a, name) != getattr(b, name)]
    return _REMEDIES[unlike[0]] if len(unlike) == 1 else _ANY_ARGUMENT


_ANY_ARGUMENT = "argument mismatch", "every rank must call it with the same arguments"
_REMEDIES = {
    "reduction": ("reduction mismatch", "every rank must pass the same reduction"),
    "root": ("roots differ", "every rank must pass the same root"),
    "shape": ("shape mismatch", "every rank must pass an array of the same shape"),
    "counts": ("counts differ", "every rank must pass the same counts"),
}
