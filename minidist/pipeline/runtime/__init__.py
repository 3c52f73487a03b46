"""Executes a plan over a communicator: stages that compute, messages between them, gradients as on one device.

pipeline.py          executes a rank's order, action by action
stages.py            a stage is a slice of the model
messages.py          what a rank sends and receives in a step
shapes.py            shapes and dtypes of what crosses the boundaries
shared.py            parameters that live on several stages
shared_shards.py     the same, where gradients are sharded
layer_profile.py     how long each layer takes in the steps that train
norm.py              the gradient norm over all stages
post_validation.py   the optimizer's step without a global barrier
pipedream.py         PipeDream: weights change while micro-batches are on their way
versions.py          the versions of weights that are still needed
stream.py            an asynchronous pipeline step by step, beyond the end of its plan
"""

from typing import TYPE_CHECKING

from minidist.base.lazy import lazy_imports

if TYPE_CHECKING:
    from minidist.pipeline.runtime.layer_profile import GivenProfile, LayerProfile, LayerTimes
    from minidist.pipeline.runtime.pipedream import WeightVersions
    from minidist.pipeline.runtime.pipeline import Pipeline
    from minidist.pipeline.runtime.post_validation import PostValidation
    from minidist.pipeline.runtime.stages import PipelineStage, SkipConnection, cut_model, split_model
    from minidist.pipeline.runtime.stream import Stream, plan_length

__all__ = [
    "GivenProfile",
    "LayerProfile",
    "LayerTimes",
    "Pipeline",
    "PipelineStage",
    "PostValidation",
    "SkipConnection",
    "Stream",
    "WeightVersions",
    "cut_model",
    "plan_length",
    "split_model",
]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
