"""Optimizers, learning-rate schedules, clipping and the loss scale: functions of arrays and names, without a rank.

optimizer.py    what all optimizers share: slices, groups of parameters, the state
state.py        loading the state of an optimizer
checks.py       what an optimizer refuses
named.py        the optimizer of a name, or of FILE.py:CLASS
sgd.py          SGD, plain and with momentum
adagrad.py      Adagrad
rmsprop.py      RMSProp
adam.py         Adam and AdamW
layerwise.py    what optimizers with a learning rate for each layer share
lars.py         LARS
lamb.py         LAMB
muon.py         Muon
exact_sums.py   sums of squares without rounding, for the norms of layers
schedule.py     learning rates as functions of the step
clip.py         clipping by the global norm of the gradient
clip_whole.py   the same where this rank has all gradients
loss_scale.py   the loss scale of float16
slices.py       the pieces of parameters that an optimizer works on
"""

from typing import TYPE_CHECKING

from minidist.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.optim.adagrad import Adagrad as Adagrad
    from minidist.optim.adam import Adam as Adam
    from minidist.optim.adam import AdamW as AdamW
    from minidist.optim.clip import NORM_BLOCK as NORM_BLOCK
    from minidist.optim.clip import add_blocks as add_blocks
    from minidist.optim.clip import block_square_sums as block_square_sums
    from minidist.optim.clip import check_max_norm as check_max_norm
    from minidist.optim.clip import clip_by_norm_ as clip_by_norm_
    from minidist.optim.clip import clip_coefficient as clip_coefficient
    from minidist.optim.clip import norm_from_blocks as norm_from_blocks
    from minidist.optim.clip import scale_gradients_ as scale_gradients_
    from minidist.optim.clip_whole import clip_grad_norm_ as clip_grad_norm_
    from minidist.optim.lamb import LAMB as LAMB
    from minidist.optim.lars import LARS as LARS
    from minidist.optim.layerwise import LayerwiseOptimizer as LayerwiseOptimizer
    from minidist.optim.loss_scale import DynamicLossScaler as DynamicLossScaler
    from minidist.optim.loss_scale import LossScaleError as LossScaleError
    from minidist.optim.loss_scale import StaticLossScaler as StaticLossScaler
    from minidist.optim.muon import Muon as Muon
    from minidist.optim.muon import is_hidden_matrix as is_hidden_matrix
    from minidist.optim.muon import newton_schulz as newton_schulz
    from minidist.optim.optimizer import MASTER as MASTER
    from minidist.optim.optimizer import NO_DECAY as NO_DECAY
    from minidist.optim.optimizer import Group as Group
    from minidist.optim.optimizer import Optimizer as Optimizer
    from minidist.optim.optimizer import OptimizerWrapper as OptimizerWrapper
    from minidist.optim.optimizer import check_optimizer_class as check_optimizer_class
    from minidist.optim.optimizer import is_bias_or_norm as is_bias_or_norm
    from minidist.optim.rmsprop import RMSProp as RMSProp
    from minidist.optim.schedule import DeepSpeedWarmup as DeepSpeedWarmup
    from minidist.optim.schedule import Warmup as Warmup
    from minidist.optim.schedule import WarmupCosine as WarmupCosine
    from minidist.optim.schedule import WarmupLinear as WarmupLinear
    from minidist.optim.sgd import SGD as SGD
    from minidist.optim.slices import FlatSlice as FlatSlice
    from minidist.optim.slices import ParameterSlice as ParameterSlice
    from minidist.optim.slices import flat_slices as flat_slices

__getattr__, __dir__ = lazy_imports(__name__, __file__)
