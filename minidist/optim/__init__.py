"""Optimizers in addition to those of the core, learning-rate schedules and the loss scale.

state.py        the state of an optimizer
groups.py       which parameters are usually not decayed
runs.py         parameters that have had unlike numbers of steps
parameter_slice.py  a slice of a parameter that lies in no flat array
checks.py       what an optimizer refuses
named.py        the optimizer of a name, or of FILE.py:CLASS
adagrad.py      Adagrad
adam.py         Adam, whose weight decay passes through the averages
rmsprop.py      RMSProp
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
    from minidist.core.optim import SGD
    from minidist.core.optim.adam import AdamW
    from minidist.optim.adagrad import Adagrad
    from minidist.optim.adam import Adam
    from minidist.optim.clip import (
        add_blocks,
        block_square_sums,
        check_max_norm,
        clip_by_norm_,
        clip_coefficient,
        norm_from_blocks,
        scale_gradients_,
    )
    from minidist.optim.clip_whole import clip_grad_norm_
    from minidist.optim.groups import NO_DECAY, is_bias_or_norm
    from minidist.optim.lamb import LAMB
    from minidist.optim.lars import LARS
    from minidist.optim.layerwise import LayerwiseOptimizer
    from minidist.optim.loss_scale import DynamicLossScaler, LossScaleError, StaticLossScaler
    from minidist.optim.muon import Muon, is_hidden_matrix, newton_schulz
    from minidist.optim.parameter_slice import ParameterSlice
    from minidist.optim.rmsprop import RMSProp
    from minidist.optim.schedule import DeepSpeedWarmup, Warmup, WarmupCosine, WarmupLinear
    from minidist.optim.wrapper import OptimizerWrapper
__getattr__, __dir__ = lazy_imports(__name__, __file__)
