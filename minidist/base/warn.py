"""A warning of what is no error, and most often a mistake. Imported where there is one.

Proved by: tests/misuse/test_warnings.py
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def warn(sentence: str) -> None:
    """Warn at the innermost line of the user's program; Python shows one warning for each such line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, UserWarning, stacklevel=level)


def warn_of_equal_names(kind: str, names: Sequence[str]) -> None:
    """Warn of parameters of one name in a model of the class `kind`: each was drawn by its layer alone."""
    for name in [one for one in dict.fromkeys(names) if one and names.count(one) > 1][:1]:
        warn(
            f"several parameters of {kind} are called {name!r}, and those of one shape begin with equal values; call"
            " initialize(seed) at the end of its __init__, which names every parameter by its path and draws its values"
        )


def warn_of_no_rows(over: str) -> None:
    """Warn that a mean is nan. over: over what it is, "0 rows"."""
    warn(f"the mean over {over} is nan; leave out a batch in which nothing counts, or pass divisor=, the global number")


def warn_without_gradient(kind: str) -> None:
    """Warn that the first step of an optimizer of the class `kind` changes nothing."""
    warn(
        f"{kind}.step() changes nothing, because no parameter has a gradient; call loss.backward() before it, and give"
        " the optimizer the parameters of the model that computes the loss"
    )
