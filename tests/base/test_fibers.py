"""Fibers of greenlets. tests/website/test_pyodide.py runs the same scenarios on promises."""

import contextvars

import pytest

from minidist.core.base.fibers import current, spawn
from tests.base.fiber_scenarios import SCENARIOS


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_fibers(scenario):
    scenario()


def test_a_paused_fiber_shows_where_it_is():
    hub = current()

    def program(_):
        hub.switch()

    fiber = spawn(program, None, contextvars.copy_context(), hub)
    fiber.switch()
    frame, names = fiber.gr_frame, []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "program" in names
    fiber.switch()
    assert fiber.gr_frame is None
