"""More of the second wing: accumulation, norms and scales of a job, against the same job on one device."""

import pytest

from minidist.comm import SimWorld
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from tests.museum.test_recent import config_of, layouts

LAYOUTS = layouts("tests/museum/test_recent_optimizer.py", "test_a_job_equals_one_device")


@pytest.mark.parametrize(("ranks", "settings"), LAYOUTS)
def test_a_job_equals_one_device(ranks, settings):
    """Every loss, gradient, weight and optimizer state of two steps."""
    config = config_of(settings)
    verdict = SimWorld(ranks).run(compare_rank, config, expected_snapshots(config, ranks))[0]
    assert verdict.equal, verdict.first_difference
