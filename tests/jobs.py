"""Training jobs that tests share: a small model, and the comparison of what its ranks send with the closed form."""

from collections import Counter

from minidist.comm import SimWorld
from minidist.job.config.train_config import resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes

SMALL_GPT = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov"}


def sent_bytes(world):
    """Return the bytes that all ranks of a world sent, by purpose."""
    total = Counter()
    for trace in world.traces:
        total.update(trace.bytes_by_purpose())
    return total


def train_in_closed_form(ranks, config):
    """Train on simulated ranks and assert that the bytes of every purpose equal the closed form; return the results."""
    world = SimWorld(ranks)
    results = world.run(train, config)
    sizes = [result.sizes for result in results]
    measured = sent_bytes(world)
    assert measured == closed_form_bytes(config, resolve_batches(config, ranks), sizes, results[0].skipped)
    return results, measured


def equals_one_device(ranks, config):
    """Compare a job on simulated ranks with one device, assert that they are equal, and return the verdict."""
    verdict = SimWorld(ranks).run(compare_rank, config, expected_snapshots(config, ranks))[0]
    assert verdict.equal, verdict.sentence()
    return verdict
