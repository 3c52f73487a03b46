"""The gradients of replicas where a technique sums whole buckets (`Extension.sums_buckets`), on one device.

This module says which gradients, and those of which replica, lie in a bucket; the technique says how a bucket is
summed. Backward fills buckets from the last parameter on:

    parameters   | wte | wpe | h.0 | h.1 | ln_f |        each replica's gradients, without those of other stages
    buckets      |  2        |  1        |  0   |        of at most this number of elements, or of one larger parameter

Proved by: tests/techniques/test_compression.py
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.layout import offsets
from minidist.core.parallel.data_parallel import BUCKET_MEGABYTES
from minidist.core.parallel.zero import REDUCE_BUCKET_SIZE
from minidist.job.config.pipeline_plan import cut_stages, make_plan
from minidist.job.equality.gradient_order import Sites, fold, order_of
from minidist.job.train.job import Job
from minidist.techniques import Extension, wrapper_options
from minidist.techniques.bucket import ReplicaBucket


class BucketSums:
    """Adds the gradients of a job's replicas, bucket by bucket, as the technique adds those of the ranks."""

    def __init__(self, job: Job, technique: Extension) -> None:
        self.technique, self.dtype = technique, job.dtype
        self.parts, self.groups = order_of(job).parts, bucket_groups(job)
        self.reductions = 0

    def add(self, contributions: Mapping[str, Sites]) -> dict[str, Array]:
        """Return the sum of each parameter: that of every reduction of the step, of each bucket, over the replicas."""
        # [parameter][reduction][replica]; there are several reductions with --synchronize-each.
        parts = {name: self.parts(name, sites) for name, sites in contributions.items()}
        totals: dict[str, list[Array]] = {name: [] for name in parts}
        for reduction in range(len(next(iter(parts.values())))):
            for group, buckets in enumerate(self.groups):
                for index, bucket in enumerate(buckets):
                    # Each replica's gradients of the bucket, one after the other.
                    flats = [
                        xp.concatenate([flat_or_zeros(part, p, self.dtype) for p, part in zip(bucket, replica)])  # noqa: B905
                        for replica in zip(*(parts[p.name][reduction] for p in bucket), strict=True)
                    ]
                    replicas = ReplicaBucket(group, index, self.reductions, bucket, flats)
                    total = self.technique.sum_of_replicas(replicas)
                    places = pairwise(offsets([p.size for p in bucket]))
                    for p, (start, stop) in zip(bucket, places, strict=True):
                        totals[p.name].append(total[start:stop].reshape(p.shape))
            self.reductions += 1
        return {name: added for name, sums in totals.items() if (added := fold(sums)) is not None}


def bucket_groups(job: Job) -> list[list[list[Parameter]]]:
    """Return the buckets of each part of the model that is reduced separately: a stage, or the tied weights."""
    config = job.config
    groups = [list(job.model.parameters())]
    if config.pp > 1:
        stages, tied = cut_stages(config, job.model, make_plan(config, job.batches.accumulation).stages)
        # Both stages that have a tied weight reduce the same sum of their gradients, so it is replayed once.
        groups = [[p for p in stage.parameters() if p.name not in tied] for stage in stages]
        groups.append([p for p in job.model.parameters() if p.name in tied])
    options = wrapper_options(config)
    if config.zero:
        cap = options.get("reduce_bucket_size", REDUCE_BUCKET_SIZE)
    else:
        cap = options.get("bucket_cap_mb", BUCKET_MEGABYTES) * 1e6 / job.dtype.itemsize
    return [buckets_of(group, cap) for group in groups]


def buckets_of(parameters: Sequence[Parameter], cap: float) -> list[list[Parameter]]:
    """Return runs of trainable parameters of at most `cap` elements, or of one larger one, filled from the end."""
    buckets: list[list[Parameter]] = []
    open_bucket = False
    for parameter in reversed(parameters):
        if not parameter.requires_grad:
            open_bucket = False
            continue
        if not open_bucket or sum(p.size for p in buckets[-1]) + parameter.size > cap:
            buckets.append([])
        buckets[-1].insert(0, parameter)
        open_bucket = True
    return buckets


def flat_or_zeros(part: Array | None, parameter: Parameter, dtype: Any) -> Array:
    """Return a replica's gradient of a parameter, 1-D; zeros where it has none."""
    return xp.zeros(parameter.size, dtype, parameter.data) if part is None else part.reshape(-1)
