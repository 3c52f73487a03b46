"""Strategies: each stands on both pillars, the engine that computes and the communicator that sends."""

from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.gradients import Bucket, GradientReducer

__all__ = ["Bucket", "DistributedDataParallel", "GradientReducer"]
