"""Jobs of every axis under mpiexec: the bits, the losses and the messages are those of simulated ranks.

That simulated ranks equal one device is in the files of each axis. What differs here is how messages travel, so that a
job of each kind is enough, and all of them share their processes.
"""

import pytest

from minidist.base.traces import sequences
from minidist.comm import SimWorld
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train

JOB = {"layers": 2, "width": 16, "heads": 4, "context": 8, "data": "markov", "steps": 2, "clip": 0.5, "lr": 0.01}
PIPELINE = {"pp": 2, "layers": 4, "microbatches": 4}
STREAM = {"pp": 3, "layers": 3, "steps": 4, "clip": None}

ON_TWO = {
    "tensor parallel": {"tp": 2},
    "sequence parallel": {"tp": 2, "sequence_parallel": True, "model": "llama", "kv_heads": 1, "ffn": 24},
    "ring attention": {"cp": 2, "model": "llama"},
    "ulysses": {"cp": 2, "attention": "ulysses", "dropout": 0.1},
    "experts": {"dp": 2, "ep": 2, "experts": 4, "top_k": 2},
    "experts cut over tp": {"tp": 2, "experts": 2, "sequence_parallel": True},
    "interleaved": {**PIPELINE, "schedule": "interleaved", "chunks": 2},
    "zb-v": {**PIPELINE, "schedule": "zb-v"},
    "dualpipe": {**PIPELINE, "schedule": "dualpipe"},
    "pipedream-2bw": {**PIPELINE, "clip": None, "schedule": "pipedream-2bw"},
}
ON_THREE = {
    "ring": {"dp": 3, "bucket_cap_mb": 0.005, "accumulation": 2},
    "ordered": {"dp": 3, "bucket_cap_mb": 0.005, "reduction": "ordered", "weights": "2,1,1", "global_batch": 8},
    "zero 1": {"dp": 3, "zero": 1, "reduce_bucket_size": 2000},
    "zero 2": {"dp": 3, "zero": 2, "precision": "bf16", "accumulation": 2},
    "zero 3": {"dp": 3, "zero": 3, "prefetch": 2},
    "zero 3 in fp16": {"dp": 3, "zero": 3, "precision": "fp16", "recompute": "full"},
    "fp16": {"dp": 3, "precision": "fp16", "loss_scale": 2.0**30},
    "1f1b": {"pp": 3, "layers": 3, "microbatches": 5},
    "zb-h1": {"pp": 3, "layers": 3, "microbatches": 4, "schedule": "zb-h1", "recompute": "stages:0"},
    "pipedream": {**STREAM, "schedule": "pipedream"},
    "pipedream on copies of a stage": {**STREAM, "schedule": "pipedream", "replicas": "2,1"},
}


def check(comm, settings):
    config = TrainConfig.make(**{**JOB, **settings})
    world = SimWorld(comm.size)
    expected = world.run(train, config)[comm.rank]
    before = len(comm.trace.messages)
    result = train(comm, config)
    assert len(comm.trace.messages) > before
    assert result.losses == expected.losses
    assert result.digest == expected.digest
    assert sequences(comm.trace) == sequences(world.traces[comm.rank])


@pytest.mark.mpi(2)
@pytest.mark.parametrize("job", ON_TWO)
def test_two_processes_send_what_two_simulated_ranks_send(comm, job):
    check(comm, ON_TWO[job])


@pytest.mark.mpi(3)
@pytest.mark.parametrize("job", ON_THREE)
def test_three_processes_send_what_three_simulated_ranks_send(comm, job):
    check(comm, ON_THREE[job])
