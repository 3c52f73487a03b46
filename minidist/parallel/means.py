"""What the loss of a backward pass is the mean over: a strategy that adds losses refuses the mean over one rank's rows.

    cross_entropy(y, t)                22 rows            cross_entropy(y, t) / 4       the same, and it is divided
    cross_entropy(..) + mse_loss(..)   22 rows + 8 elements

Proved by: tests/misuse/test_misuse.py
"""

from typing import Any

from minidist.core.autograd import MeanOfRows, Node

_LINEAR = ("add", "sub", "neg", "div", "cast")  # operations between means and a loss that averages them


def note_means(running: Any, root: Node, gradient: Any) -> None:
    """Note in a `BackwardPass` what its loss is the mean over.

    means: "22 rows"; "" of other losses, and where the gradient is not 1. is_mean: whether it is a mean that nothing
    divides, or a sum that has one.
    """
    running.means, running.is_mean = "", False
    may_average = isinstance(root.name, MeanOfRows) or root.hook is not None or root.name in _LINEAR
    if may_average and gradient.size == 1 and gradient.item() == 1:
        running.means, running.is_mean = _means_in(root)


def _means_in(loss: Node) -> tuple[str, bool]:
    """Return what a loss is the mean over ("22 rows", "8 rows + 5 rows" of a sum), and whether one is not divided.

    A mean that is divided, as by the number of micro-batches, is one, too. Of one that is multiplied nothing is said:
    its factor may be this rank's part of all rows.
    """
    found, pending, seen = [], [(loss, False)], set()
    while pending:
        node, divided = pending.pop()
        if isinstance(node.name, MeanOfRows):
            found.append((node.name.over, divided))
        elif node not in seen and node.inputs and (node.name in _LINEAR or (node.hook and node.name != "checkpoint")):
            seen.add(node)
            divided = divided or node.name == "div"
            pending += [(source, divided) for source, _ in reversed(node.inputs)]
    return " + ".join(over for over, _ in found), not all(divided for _, divided in found)
