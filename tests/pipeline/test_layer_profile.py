"""What a layer takes on its rank: the seconds of all actions, by the forward passes of the layers."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.job.train.trainer import train
from minidist.pipeline.runtime.layer_profile import LayerProfile, LayerTimes
from minidist.techniques.repartition.extension import profiled_by
from tests.train.test_shares import config_of


def measured(slowdown=lambda rank: 1.0, **values):
    """Return each rank's times of two steps, and the seconds that it has computed in a step."""
    config, _, ranks = config_of(
        layers=4, pp=2, global_batch=4, steps=4, repartition_every=3, optimizer="sgd", **values
    )
    seen = {}

    class Kept(LayerProfile):
        def take(self, done):
            seen[self.comm.rank] = (super().take(done), seconds[self.comm.rank])

    seconds = {}

    class Watched(Kept):
        def end_step(self):
            seconds[self.comm.rank] = sum(self.actions.values())
            super().end_step()

    with profiled_by(Watched):
        SimWorld(ranks, links=LinkModel(alpha=0.0, beta=0.0, slowdown=slowdown)).run(train, config)
    return [seen[rank] for rank in range(ranks)]


@pytest.mark.parametrize("values", [{}, {"schedule": "zb-h1"}, {"recompute": "full"}, {"recompute": "selective"}])
def test_all_seconds_of_a_step_are_those_of_a_layer_or_beside_them(values):
    (first, all_of_first), (last, all_of_last) = measured(microbatches=2, **values)
    assert first.seconds.sum() + first.front == pytest.approx(all_of_first, rel=1e-9)
    assert last.seconds.sum() + last.back == pytest.approx(all_of_last, rel=1e-9)
    assert (first.seconds > 0).tolist() == [True, True, False, False]
    assert (last.seconds > 0).tolist() == [False, False, True, True]
    assert min(first.front, last.back) > 0 == max(first.back, last.front)

    # Equal blocks: equal FLOPs and, on a virtual clock, equal seconds.
    assert first.seconds[0] == pytest.approx(first.seconds[1])
    assert first.flops[0] == first.flops[1] == last.flops[2]


def test_a_slow_rank_has_a_larger_pace():
    (first, _), (last, _) = measured(lambda rank: 3.0 if rank else 1.0, microbatches=2, schedule="gpipe")
    paces = [times.seconds.sum() / times.flops.sum() for times in (first, last)]
    # Not exactly three times: a stage's backward is shared among layers, embedding and head by their forwards.
    assert 2.5 < paces[1] / paces[0] < 3.5


def test_numbers_are_sent_and_read_back():
    times = LayerTimes(np.array([1.0, 2.0]), np.array([3.0, 4.0]), 5.0, 6.0)
    assert str(LayerTimes.of(times.numbers())) == str(times)


def test_medians_without_the_first_step():
    profile = LayerProfile()
    profile.watch(None, {}, 1, 0)
    for seconds in (100.0, 3.0, 50.0, 2.0):
        profile.forward, profile._of_step = None, lambda seconds=seconds: LayerTimes(np.array([seconds]), np.ones(1))
        profile.forward = np.zeros(1)
        profile.end_step()
    assert profile.take(4).seconds == [3.0]
    assert profile.take(4) is None
