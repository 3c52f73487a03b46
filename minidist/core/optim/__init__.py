"""Optimizers: they update named arrays, and know nothing about ranks.

optimizer.py    what all optimizers share: slices and groups of parameters, the state
sgd.py          SGD, plain, with momentum, and in Nesterov's form
adam.py         AdamW
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.optim.adam import AdamW
    from minidist.core.optim.optimizer import NORM_BLOCK, FlatSlice, Group, Optimizer, flat_slices
    from minidist.core.optim.sgd import SGD
__getattr__, __dir__ = lazy_imports(__name__, __file__)
