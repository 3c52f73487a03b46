"""Executes a plan over a communicator: stages that compute, messages between them, gradients as on one device.

pipeline.py          executes a rank's order, action by action
stages.py            a stage is a slice of the model
messages.py          what a rank sends and receives in a step, and its shapes and dtypes
reduction.py         who sums the gradients of a rank's stages, and of parameters that several stages hold
"""

from minidist.core.pipeline.runtime.pipeline import Pipeline
from minidist.core.pipeline.runtime.reduction import Reduction
from minidist.core.pipeline.runtime.stages import PipelineStage, cut_model, split_model
