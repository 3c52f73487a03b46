"""More of the second wing: accumulation, norms and scales of a job, against the same job on one device."""

import pytest

from minidist.comm import SimWorld
from minidist.course.museum import recent_loss_scales, recent_optimizer
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from tests.museum.test_recent import config_of

LAYOUTS = [
    (2, recent_optimizer.ACCUMULATED),
    (2, recent_optimizer.OWN_EXPERTS),
    (4, recent_optimizer.HYBRID),
    (2, recent_optimizer.CLIPPED_EXPERTS),
    (2, {"zero": 2}),
    (2, recent_optimizer.SHARDED),
    (2, recent_optimizer.SCALED),
    (2, recent_optimizer.STALE),
    (2, recent_optimizer.ADAM),
    (2, recent_loss_scales.HEADS),
    (2, recent_loss_scales.BALANCED),
    (2, recent_loss_scales.SPLIT_EXPERTS),
    (2, recent_loss_scales.SPLIT),
    (2, recent_loss_scales.SEQUENCES),
    (2, recent_loss_scales.STAGES),
]


@pytest.mark.parametrize(("ranks", "settings"), LAYOUTS)
def test_a_job_equals_one_device(ranks, settings):
    """Every loss, gradient, weight and optimizer state of two steps."""
    config = config_of(settings)
    verdict = SimWorld(ranks).run(compare_rank, config, expected_snapshots(config, ranks))[0]
    assert verdict.equal, verdict.first_difference
