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
    from minidist.optim.adagrad import Adagrad
    from minidist.optim.adam import Adam, AdamW
    from minidist.optim.clip import (
        NORM_BLOCK,
        add_blocks,
        block_square_sums,
        check_max_norm,
        clip_by_norm_,
        clip_coefficient,
        norm_from_blocks,
        scale_gradients_,
    )
    from minidist.optim.clip_whole import clip_grad_norm_
    from minidist.optim.lamb import LAMB
    from minidist.optim.lars import LARS
    from minidist.optim.layerwise import LayerwiseOptimizer
    from minidist.optim.loss_scale import DynamicLossScaler, LossScaleError, StaticLossScaler
    from minidist.optim.muon import Muon, is_hidden_matrix, newton_schulz
    from minidist.optim.optimizer import (
        MASTER,
        NO_DECAY,
        Group,
        Optimizer,
        OptimizerWrapper,
        check_optimizer_class,
        is_bias_or_norm,
    )
    from minidist.optim.rmsprop import RMSProp
    from minidist.optim.schedule import DeepSpeedWarmup, Warmup, WarmupCosine, WarmupLinear
    from minidist.optim.sgd import SGD
    from minidist.optim.slices import FlatSlice, ParameterSlice, flat_slices

__all__ = [
    "LAMB",
    "LARS",
    "MASTER",
    "NORM_BLOCK",
    "NO_DECAY",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "DeepSpeedWarmup",
    "DynamicLossScaler",
    "FlatSlice",
    "Group",
    "LayerwiseOptimizer",
    "LossScaleError",
    "Muon",
    "Optimizer",
    "OptimizerWrapper",
    "ParameterSlice",
    "RMSProp",
    "StaticLossScaler",
    "Warmup",
    "WarmupCosine",
    "WarmupLinear",
    "add_blocks",
    "block_square_sums",
    "check_max_norm",
    "check_optimizer_class",
    "clip_by_norm_",
    "clip_coefficient",
    "clip_grad_norm_",
    "flat_slices",
    "is_bias_or_norm",
    "is_hidden_matrix",
    "newton_schulz",
    "norm_from_blocks",
    "scale_gradients_",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
