"""`--prefetch-batches`, `--loader-workers`: a job has the bits of one that reads when it needs, in every loop."""

import pytest

from minidist.comm import SimWorld
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train


@pytest.mark.parametrize(
    "layout", [{"dp": 2, "accumulation": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "microbatches": 4}], ids=str
)
def test_training_has_the_same_bits(layout):
    job = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov", "steps": 3}
    results = [SimWorld(2).run(train, TrainConfig.make(**job, **layout, prefetch_batches=depth)) for depth in (0, 2)]
    for one, other in zip(*results, strict=True):
        assert (one.losses, one.digest) == (other.losses, other.digest)


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_workers_of_a_parameter_server_read_ahead_too(model):
    job = {"model": model, "layers": 1, "width": 8, "heads": 2, "context": 6, "data": "markov", "steps": 3}
    job |= {"strategy": "ps", "accumulation": 2, "dp": 2}
    served = []

    def look(state):
        served.append(getattr(state.job.sampler, "served", 0))

    results = [SimWorld(3).run(train, TrainConfig.make(**job, prefetch_batches=n), [look]) for n in (0, 2)]
    for one, other in zip(*results, strict=True):
        assert (one.losses, one.digest) == (other.losses, other.digest)
    # Of each worker all batches of all steps; the server reads none.
    assert sorted(served) == [*[0] * (9 + 3), *[6] * 6]


def test_a_replica_reads_its_own_batches_ahead():
    """Of 9 steps in streams of 5 and 4, the replicas of the first stage have 5 and 4, the last stage all."""
    served = {}

    def observer(state):
        served[state.rank] = state.job.sampler.served

    observer.reads_tensors = False
    values = {"width": 8, "heads": 2, "context": 6, "micro_batch": 2, "layers": 3, "reduction": "ordered"}
    values |= {"model": "mlp", "data": "glyphs", "schedule": "pipedream", "pp": 3, "replicas": "2,1"}
    values |= {"steps": 9, "evaluate_every": 5, "prefetch_batches": 2}
    SimWorld(3).run(train, TrainConfig.make(**values), [observer])
    assert served == {0: 5, 1: 4, 2: 9}


def test_a_job_with_workers_has_the_bits_of_one_without():
    job = {"layers": 1, "width": 8, "heads": 2, "context": 6, "data": "markov", "steps": 2, "evaluate_every": 2}
    alone, helped = (SimWorld(1).run(train, TrainConfig.make(**job, loader_workers=n))[0] for n in (0, 1))
    assert (alone.losses, alone.digest, alone.held_out) == (helped.losses, helped.digest, helped.held_out)


DELAYS = """
from contextlib import contextmanager
from minidist.techniques import Extension

class Next:
    def __init__(self, sampler):
        self.sampler = sampler
    def __getattr__(self, name):
        return getattr(self.sampler, name)
    def batch(self, step, first, count):
        return self.sampler.batch(step + 1, first, count)

class ReadsNext(Extension):
    @contextmanager
    def reading(self, sampler, replica, steps):
        self.asked = (replica, list(steps))
        yield Next(sampler)
    def result(self):
        return {"asked": self.asked}
"""


def test_any_technique_may_make_the_batches_and_another_one_makes_them_ahead(tmp_path):
    """Steps 0 to 2 with the batches of steps 1 to 3; their thread is below, as folders come before users' files."""
    source = tmp_path / "user.py"
    source.write_text(DELAYS)
    job = {"layers": 1, "width": 8, "heads": 2, "context": 6, "data": "markov", "dp": 2, "micro_batch": 1, "lr": 1e-30}
    whole = SimWorld(2).run(train, TrainConfig.make(**job, steps=4))
    config = TrainConfig.make(**job, steps=3, extension=f"{source}:ReadsNext", prefetch_batches=1)
    shifted = SimWorld(2).run(train, config)
    assert shifted[0].losses == pytest.approx(whole[0].losses[1:], abs=1e-6)
    assert shifted[0].losses[0] != pytest.approx(whole[0].losses[0], abs=1e-6)
    assert [result.measured["asked"] for result in shifted] == [(0, [0, 1, 2]), (1, [0, 1, 2])]
