"""A slice of a parameter that lies in no flat array: what an optimizer of other arrays works on.

Proved by: tests/optim/test_optimizers.py, tests/optim/test_muon.py
"""

from dataclasses import dataclass

from minidist.core.base import arrays as xp


@dataclass
class ParameterSlice:
    """Some elements of a parameter: `data` and `grad` are 1-D arrays of one dtype; `grad` None means no gradient.

    shape: of the parameter, when the slice is all of it; Muon steps matrices differently.
    """

    data: xp.Array
    grad: xp.Array | None
    name: str = ""
    shape: tuple[int, ...] = ()
