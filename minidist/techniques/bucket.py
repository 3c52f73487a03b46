"""The gradients of all replicas in a bucket, on one device: what a technique that `sums_buckets` adds in its own way.

The ranks of such a technique reduce whole buckets with a communication hook. The reference on one device
(`job/equality/bucket_sums.py`) knows which gradients lie in which bucket, and leaves their sum to the technique's
`sum_of_replicas`.

Proved by: tests/techniques/test_compression.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array


@dataclass(frozen=True)
class ReplicaBucket:
    """One bucket in one reduction of the job.

    group: the part of the model that is reduced separately. index: of the bucket in the group. reduction: how many were
    made before in the job. parameters: in the order in which they lie in the bucket. gradients: of each replica, 1-D.
    """

    group: int
    index: int
    reduction: int
    parameters: Sequence[Parameter]
    gradients: Sequence[Array]
