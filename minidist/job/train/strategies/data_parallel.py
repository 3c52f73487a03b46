"""The data axis on which every rank holds all parameters, gradients and optimizer state: data parallelism.

Proved by: tests/equality/test_equality.py, tests/techniques/test_compression.py
"""

from minidist.core.comm import Comm
from minidist.core.train import data_axis
from minidist.core.train.data_axis import Group
from minidist.job.checkpoint.directory import ReplicaId
from minidist.job.train.job import Job
from minidist.job.train.strategies.data_axis import DataAxis, Replicas


class Replicated(data_axis.Replicated, DataAxis):
    """Data parallelism in a job."""

    def __init__(self, job: Job, group: Group) -> None:
        super().__init__(job, group)
        self.place = group.comm

    def replicas_on(self, comm: Comm) -> Replicas:
        replica = ReplicaId(comm.rank, comm.size)
        return Replicas(replica, replica)
