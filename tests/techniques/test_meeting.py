"""A technique of a user's own may let replicas train alone: the trunk's axis and reference serve it as they are."""

from pathlib import Path

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.techniques import Extension
from tests.techniques.test_local_steps import UNEVEN, config

ONCE = """
from minidist.core.collectives import all_reduce
from minidist.techniques import Extension
from minidist.techniques.meeting import Meeting, Replay

class Last(Meeting):
    "Replicas meet after the last step only, and rank 0's weights count twice in their sum."
    def __init__(self, replica):
        self.optimizer, self.replica = replica.make_optimizer(), replica
    def step(self):
        self.optimizer.step()
        if self.optimizer.step_count == self.replica.steps:
            flat, comm = self.replica.flat, self.replica.comm
            flat.data[...] *= 2 if comm.rank == 0 else 1
            all_reduce(comm, flat.data, algorithm=self.replica.reduction)
            flat.updated()

class LastReplay(Replay):
    def __init__(self, devices):
        self.devices = devices
    def after_step(self, done):
        if done == self.devices[0].job.config.steps:
            first, *others = (device.flat.data.copy() for device in self.devices)
            total = 2 * first
            for other in others:
                total = total + other
            for device in self.devices:
                device.flat.data[...] = total
                device.flat.updated()

class Once(Extension):
    trains_alone = True
    def meeting(self, replica):
        return Last(replica)
    def replay(self, devices, mean):
        return LastReplay(devices)
"""


@pytest.mark.parametrize(("ranks", "values"), [(1, {}), (3, {"optimizer": "adam"}), (2, {**UNEVEN, "weights": "3,1"})])
def test_replicas_that_meet_once_equal_one_device(ranks, values, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(ONCE)
    made, seen = config(extension="own.py:Once", **values), {}
    for verdict in SimWorld(ranks).run(compare_rank, made):
        assert verdict.equal, verdict.first_difference

    def note(state):
        seen[state.rank, state.step] = state.strategy.tensors()["weights"]["transformer.h.0.mlp.c_fc.weight"]

    SimWorld(ranks).run(train, made, [note])
    same = [all(np.array_equal(seen[0, step], seen[rank, step]) for rank in range(ranks)) for step in range(4)]
    assert same == [ranks == 1] * 3 + [True]


def test_a_technique_that_trains_alone_has_to_say_how():
    with pytest.raises(NotImplementedError):
        Extension(None).meeting(None)
    with pytest.raises(NotImplementedError):
        Extension(None).replay([], None)
