"""Small jobs of every axis and technique do what they did when golden.json was written: counts, times and bits."""

import json

import numpy as np
import pytest

from tests.golden.golden import GOLDEN, environment, record
from tests.golden.jobs import JOBS

RECORDED = json.loads(GOLDEN.read_text(encoding="utf-8"))
REMEDY = "; if the change is meant, run python -m tests.golden.golden and explain it in the commit"


def test_every_job_is_recorded():
    assert list(RECORDED["jobs"]) == list(JOBS)


@pytest.mark.parametrize("third", range(3))
def test_jobs_do_what_they_did(third):
    # Bits depend on the processor's products; without the recorded one, losses agree to rounding.
    same = RECORDED["environment"] == environment()
    for name in list(JOBS)[third::3]:
        expected = dict(RECORDED["jobs"][name])
        numbers = expected.pop("numbers")
        found, measured = record(name)
        for key in expected:
            assert found[key] == expected[key], f"{name}: {key}{REMEDY}"
        assert not same or measured == numbers, f"{name}: other bits{REMEDY}"
        np.testing.assert_allclose(measured.get("losses", []), numbers.get("losses", []), rtol=1e-3, err_msg=name)
