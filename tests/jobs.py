"""Training jobs that tests share: a small model, and the comparison of what its ranks send with the closed form."""

from collections import Counter

from minidist.comm import SimWorld
from minidist.core.base.trace import purpose
from minidist.job.config.train_config import resolve_batches, resolve_dims
from minidist.job.equality.compare import Judge, compare_rank, tier_of
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
    """Train on simulated ranks, assert that the bytes of every purpose equal the closed form; return results, bytes."""
    world = SimWorld(ranks)
    results = world.run(train, config)
    return results, in_closed_form(config, results, sent_bytes(world))


def in_closed_form(config, results, measured):
    """Assert that the bytes that a job sent, by purpose, equal the closed form, and return them."""
    batches = resolve_batches(config, len(results))
    sizes = [result.sizes for result in results]
    closed = Counter(closed_form_bytes(config, batches, sizes, results[0].skipped))
    assert measured == closed + evaluation_bytes(config, batches, sizes, 0)
    return measured


def equals_one_device(ranks, config):
    """Compare a job on simulated ranks with one device, assert that they are equal, and return the verdict."""
    verdict = SimWorld(ranks).run(compare_rank, config, expected_snapshots(config, ranks))[0]
    assert verdict.equal, verdict.sentence()
    return verdict


def train_compared(world, config, main=train):
    """Train, assert that each step equals that of one device, and return the results, the verdict and the bytes.

    One job is enough for the assertions of `equals_one_device` and `train_in_closed_form`: what ranks gather for the
    comparison is sent for the purpose `checkpoint`, which is left out of the bytes.
    """
    assert config.save is None
    dims, expected = resolve_dims(config, world.size), expected_snapshots(config, world.size)
    tier = tier_of(config, dims)
    judges = [Judge(expected, tier) for _ in range(world.size)]

    def compared(state):
        with purpose("checkpoint", whole=True):
            judges[state.rank](state)

    results = world.run(main, config, [compared])
    assert [judge.verdict.first_difference for judge in judges] == [None] * world.size
    assert sum(judge.verdict.steps == config.steps for judge in judges) == dims.ranks  # the others hold no weights
    measured = sent_bytes(world)
    del measured["checkpoint"]
    return results, judges[0].verdict, measured


def equals_one_device_in_closed_form(ranks, config):
    """Assert what `equals_one_device` and `train_in_closed_form` do, with one job; return the verdict and the bytes."""
    results, verdict, measured = train_compared(SimWorld(ranks), config)
    return verdict, in_closed_form(config, results, measured)


def replicas_equal_one_device(ranks, config, ranks_of_a_replica=1):
    """Compare each replica that trains alone with one device, bit for bit; return the snapshots of these devices."""
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
