"""Executes a plan over a communicator: stages that compute, messages between them, gradients that equal one device's."""

from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.runtime.stages import PipelineStage, SkipTo, cut_model, split_model

__all__ = ["Pipeline", "PipelineStage", "SkipTo", "cut_model", "split_model"]
