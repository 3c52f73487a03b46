"""Optimizers, learning-rate schedules, clipping and the loss scale: functions of arrays and names, without a rank.

optimizer.py    what all optimizers share: slices, groups of parameters, the state
sgd.py          SGD, plain and with momentum
adam.py         Adam and AdamW
clip.py         clipping by the global norm of the gradient
slices.py       the pieces of parameters that an optimizer works on
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.core.optim.adam import Adam as Adam
    from minidist.core.optim.adam import AdamW as AdamW
    from minidist.core.optim.clip import NORM_BLOCK as NORM_BLOCK
    from minidist.core.optim.clip import add_blocks as add_blocks
    from minidist.core.optim.clip import block_square_sums as block_square_sums
    from minidist.core.optim.clip import check_max_norm as check_max_norm
    from minidist.core.optim.clip import clip_by_norm_ as clip_by_norm_
    from minidist.core.optim.clip import clip_coefficient as clip_coefficient
    from minidist.core.optim.clip import norm_from_blocks as norm_from_blocks
    from minidist.core.optim.clip import scale_gradients_ as scale_gradients_
    from minidist.core.optim.optimizer import MASTER as MASTER
    from minidist.core.optim.optimizer import NO_DECAY as NO_DECAY
    from minidist.core.optim.optimizer import Group as Group
    from minidist.core.optim.optimizer import Optimizer as Optimizer
    from minidist.core.optim.optimizer import OptimizerWrapper as OptimizerWrapper
    from minidist.core.optim.optimizer import is_bias_or_norm as is_bias_or_norm
    from minidist.core.optim.sgd import SGD as SGD
    from minidist.core.optim.slices import FlatSlice as FlatSlice
    from minidist.core.optim.slices import ParameterSlice as ParameterSlice
    from minidist.core.optim.slices import flat_slices as flat_slices
__getattr__, __dir__ = lazy_imports(__name__, __file__)
