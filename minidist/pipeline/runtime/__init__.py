"""Executes a plan over a communicator: stages that compute, messages between them, gradients as on one device.

pipeline.py          executes a rank's order, action by action
stages.py            a stage is a slice of the model
messages.py          what a rank sends and receives in a step
shapes.py            shapes and dtypes of what crosses the boundaries
reduction.py         who sums the gradients of a rank's stages
shared.py            parameters that live on several stages
shared_shards.py     the same, where gradients are sharded
refusals.py          what a pipeline refuses
norm.py              the gradient norm over all stages
clip.py              clipping by it
evaluation.py        the forward passes alone
layer_profile.py     how long each layer takes in the steps that train
post_validation.py   the optimizer's step without a global barrier
versioned.py         a pipeline whose weights change while micro-batches are on their way
pipedream.py         PipeDream: which weights each action uses, and when they change
versions.py          the versions of weights that are still needed
stream.py            an asynchronous pipeline step by step, beyond the end of its plan
"""

from minidist.pipeline.runtime.pipeline import Pipeline as Pipeline
from minidist.pipeline.runtime.reduction import Reduction as Reduction
from minidist.pipeline.runtime.stages import PipelineStage as PipelineStage
from minidist.pipeline.runtime.stages import SkipConnection as SkipConnection
from minidist.pipeline.runtime.stages import cut_model as cut_model
from minidist.pipeline.runtime.stages import split_model as split_model
