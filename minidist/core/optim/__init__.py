"""Optimizers and clipping: functions of arrays and names, which know no ranks.

optimizer.py    what all optimizers share: slices, groups of parameters, the state
sgd.py          SGD, plain and with momentum
adam.py         Adam and AdamW
clip.py         clipping by the global norm of the gradient
slices.py       the pieces of parameters that an optimizer works on
"""

# mypy: implicit_reexport
# ruff: noqa: F401

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.optim.adam import Adam, AdamW
    from minidist.core.optim.clip import (
        NORM_BLOCK,
        add_blocks,
        block_square_sums,
        check_max_norm,
        clip_by_norm_,
        clip_coefficient,
        norm_from_blocks,
        scale_gradients_,
    )
    from minidist.core.optim.optimizer import MASTER, Group, Optimizer, OptimizerWrapper
    from minidist.core.optim.sgd import SGD
    from minidist.core.optim.slices import FlatSlice, flat_slices
__getattr__, __dir__ = lazy_imports(__name__, __file__)
