"""Training jobs that tests share: a small model, and the comparison of what its ranks send with the closed form."""

from collections import Counter

from minidist.comm import SimWorld
from minidist.job.config.train_config import resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from minidist.job.equality.replicas_alone import replicas_reference
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes, evaluation_bytes

SMALL_GPT = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov"}


def sent_bytes(world):
    """Return the bytes that all ranks of a world sent, by purpose."""
    total = Counter()
    for trace in world.traces:
        total.update(trace.bytes_by_purpose())
    return total


def train_in_closed_form(ranks, config):
    """Train on simulated ranks and assert that the bytes of every purpose equal the closed form; return the results."""
    world, batches = SimWorld(ranks), resolve_batches(config, ranks)
    results = world.run(train, config)
    sizes = [result.sizes for result in results]
    closed = Counter(closed_form_bytes(config, batches, sizes, results[0].skipped))
    measured = sent_bytes(world)
    assert measured == closed + evaluation_bytes(config, batches, sizes, 0)
    return results, measured


def equals_one_device(ranks, config):
    """Compare a job on simulated ranks with one device, assert that they are equal, and return the verdict."""
    verdict = SimWorld(ranks).run(compare_rank, config, expected_snapshots(config, ranks))[0]
    assert verdict.equal, verdict.sentence()
    return verdict


def replicas_equal_one_device(ranks, config, ranks_of_a_replica=1):
    """Compare each replica that trains alone with a device of its own, bit for bit; return what these have."""
    expected = replicas_reference(config, resolve_batches(config, ranks))  # once for all
    of_data_axis = len(expected) * ranks_of_a_replica
    number = [rank % of_data_axis // ranks_of_a_replica for rank in range(ranks)]
    for verdict in SimWorld(ranks).run(lambda comm: compare_rank(comm, config, expected[number[comm.rank]])):
        assert verdict.equal, verdict.first_difference
        assert verdict.tier == "ordered"
    return expected


def has_the_bits_of(results, others):
    """Assert that two runs end with the same bits on every rank, and report the same losses."""
    assert [result.digest for result in results] == [result.digest for result in others]
    assert results[0].losses == others[0].losses
