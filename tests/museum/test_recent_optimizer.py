"""More of the second wing: accumulation, norms and scales of a job, against the same job on one device."""

import pytest

from tests.jobs import equals_one_device
from tests.museum.test_recent import config_of, layouts

LAYOUTS = layouts("tests/museum/test_recent_optimizer.py", "test_a_job_equals_one_device")


@pytest.mark.parametrize(("ranks", "settings"), LAYOUTS)
def test_a_job_equals_one_device(ranks, settings):
    """Every loss, gradient, weight and optimizer state of two steps."""
    config = config_of(settings)
    equals_one_device(ranks, config)
