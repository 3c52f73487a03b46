"""Optimizers in addition to those of the core, learning-rate schedules and the loss scale.

state.py        the state of an optimizer
groups.py       which parameters are usually not decayed
runs.py         parameters that have had unlike numbers of steps
parameter_slice.py  a slice of a parameter that lies in no flat array
checks.py       what an optimizer refuses
named.py        the optimizer of a name, or of FILE.py:CLASS
adagrad.py      Adagrad
rmsprop.py      RMSProp
sgd.py          SGD with dampening, and in Nesterov's form
wrapper.py      what holds an optimizer and has its attributes
layerwise.py    what optimizers with a learning rate for each layer share
lars.py         LARS
lamb.py         LAMB
muon.py         Muon
exact_sums.py   sums of squares without rounding, for the norms of layers
schedule.py     learning rates as functions of the step
clip.py         clipping by the global norm of the gradient
clip_whole.py   the same where this rank has all gradients
loss_scale.py   the loss scale of float16
"""

from typing import TYPE_CHECKING

from minidist.core.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.optim.adagrad import Adagrad as Adagrad
    from minidist.optim.clip import add_blocks as add_blocks
    from minidist.optim.clip import block_square_sums as block_square_sums
    from minidist.optim.clip import check_max_norm as check_max_norm
    from minidist.optim.clip import clip_by_norm_ as clip_by_norm_
    from minidist.optim.clip import clip_coefficient as clip_coefficient
    from minidist.optim.clip import norm_from_blocks as norm_from_blocks
    from minidist.optim.clip import scale_gradients_ as scale_gradients_
    from minidist.optim.clip_whole import clip_grad_norm_ as clip_grad_norm_
    from minidist.optim.groups import NO_DECAY as NO_DECAY
    from minidist.optim.groups import is_bias_or_norm as is_bias_or_norm
    from minidist.optim.lamb import LAMB as LAMB
    from minidist.optim.lars import LARS as LARS
    from minidist.optim.layerwise import LayerwiseOptimizer as LayerwiseOptimizer
    from minidist.optim.loss_scale import DynamicLossScaler as DynamicLossScaler
    from minidist.optim.loss_scale import LossScaleError as LossScaleError
    from minidist.optim.loss_scale import StaticLossScaler as StaticLossScaler
    from minidist.optim.muon import Muon as Muon
    from minidist.optim.muon import is_hidden_matrix as is_hidden_matrix
    from minidist.optim.muon import newton_schulz as newton_schulz
    from minidist.optim.parameter_slice import ParameterSlice as ParameterSlice
    from minidist.optim.rmsprop import RMSProp as RMSProp
    from minidist.optim.schedule import DeepSpeedWarmup as DeepSpeedWarmup
    from minidist.optim.schedule import Warmup as Warmup
    from minidist.optim.schedule import WarmupCosine as WarmupCosine
    from minidist.optim.schedule import WarmupLinear as WarmupLinear
    from minidist.optim.sgd import SGD as SGD
    from minidist.optim.wrapper import OptimizerWrapper as OptimizerWrapper
__getattr__, __dir__ = lazy_imports(__name__, __file__)
