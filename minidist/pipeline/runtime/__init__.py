"""Executes a plan over a communicator: stages that compute, messages between them, gradients as on one device."""

from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.runtime.post_validation import PostValidation
from minidist.pipeline.runtime.stages import PipelineStage, SkipConnection, cut_model, split_model

__all__ = [
    "Pipeline",
    "PipelineStage",
    "PostValidation",
    "SkipConnection",
    "WeightVersions",
    "cut_model",
    "split_model",
]
