"""What fibers must do, as functions without NumPy and pytest: test_fibers.py runs them here, and in Pyodide."""

import contextvars
import sys
import traceback
from collections import deque

from minidist.core.base.fibers import FiberExit, current, spawn, throw

variable = contextvars.ContextVar("variable", default=0)


class _Main:
    """The program that starts the scenarios."""

    hub = None


def pause():
    """Hand control back to the hub of the scenarios."""
    _Main.hub.switch()


def _spawned(program, argument):
    _Main.hub = current()
    return spawn(program, argument, contextvars.copy_context(), current())


def each_fiber_runs_from_pause_to_pause():
    log = []

    def program(name):
        for step in range(3):
            log.append(f"{name}{step}")
            pause()

    fibers = [_spawned(program, name) for name in "ab"]
    assert log == []
    for _ in range(4):
        for fiber in fibers:
            fiber.switch()
        log.append("|")
    assert [fiber.dead for fiber in fibers] == [True, True]
    assert " ".join(log) == "a0 b0 | a1 b1 | a2 b2 | |"


def an_exception_is_raised_where_the_fiber_was_switched_to():
    def program(_):
        pause()
        raise LookupError("inside")

    fiber = _spawned(program, None)
    fiber.switch()
    try:
        fiber.switch()
    except LookupError as error:
        text = "".join(traceback.format_exception(error))
        assert "in program" in text
        assert fiber.dead
        return
    raise AssertionError("nothing was raised")


def a_fiber_may_catch_what_is_thrown_and_go_on():
    log = []

    def program(_):
        try:
            pause()
        except LookupError as error:
            log.append(str(error))
            pause()
        log.append("end")

    fiber = _spawned(program, None)
    fiber.switch()
    throw(fiber, LookupError("thrown"))
    assert (log, fiber.dead) == (["thrown"], False)
    fiber.switch()
    assert (log, fiber.dead) == (["thrown", "end"], True)


def an_exit_runs_finally_and_is_raised_nowhere():
    log = []

    def program(_):
        try:
            pause()
        except Exception:
            log.append("an exit is not an Exception")
        finally:
            log.append("finally")

    fiber = _spawned(program, None)
    fiber.switch()
    throw(fiber, FiberExit)
    unstarted = _spawned(program, None)
    throw(unstarted, FiberExit)
    assert (log, fiber.dead, unstarted.dead) == (["finally"], True, True)


def a_fiber_ends_another_one_and_goes_on():
    log = []

    def victim(_):
        try:
            pause()
        finally:
            log.append("ended")

    def killer(other):
        throw(other, FiberExit)
        log.append("goes on")
        pause()
        log.append("after a pause")

    first = _spawned(victim, None)
    first.switch()
    second = _spawned(killer, first)
    second.switch()
    log.append("caller")
    second.switch()
    assert log == ["ended", "goes on", "caller", "after a pause"]
    assert first.dead
    assert second.dead


def context_variables_and_handled_exceptions_are_each_fibers_own():
    log = []

    def program(value):
        variable.set(value)
        try:
            raise LookupError(value)
        except LookupError:
            pause()
            log.append((variable.get(), sys.exc_info()[1].args[0]))
        inner = contextvars.copy_context()
        inner.run(within, 10 * value)
        log.append((variable.get(), sys.exc_info()[1]))

    def within(value):
        variable.set(value)
        pause()
        log.append((variable.get(), sys.exc_info()[1]))

    fibers = [_spawned(program, value) for value in (1, 2)]
    for _ in range(3):
        for fiber in fibers:
            fiber.switch()
            assert variable.get() == 0
            assert sys.exc_info()[1] is None
    assert log == [(1, 1), (2, 2), (10, None), (1, None), (20, None), (2, None)]


def a_fiber_begins_with_the_context_that_it_is_given():
    log = []
    context = contextvars.copy_context()
    context.run(variable.set, 5)
    spawn(lambda _: log.append(variable.get()), None, context, current()).switch()
    assert (log, variable.get()) == ([5], 0)


def a_fiber_has_no_frames_of_the_program_that_runs_it():
    names = []

    def program(_):
        pause()
        frame = sys._getframe()
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back

    fiber = _spawned(program, None)
    fiber.switch()
    fiber.switch()
    assert "program" in names
    assert "a_fiber_has_no_frames_of_the_program_that_runs_it" not in names


def the_fiber_that_runs_is_known():
    seen = []

    def program(_):
        seen.append(current())
        pause()
        seen.append(current())

    before = current()
    fiber = _spawned(program, None)
    fiber.switch()
    assert current() is before
    fiber.switch()
    assert seen == [fiber, fiber]


def a_scheduler_runs_a_ring_of_fifty_and_finds_the_deadlock():
    """The loop of SimWorld: whoever is ready runs until it blocks; when none is ready, the rest is deadlocked."""
    size = 50
    boxes, waiting, ready = [deque() for _ in range(size)], {}, deque()

    def receive(rank):
        while not boxes[rank]:
            waiting[rank] = fibers[rank]
            pause()
        return boxes[rank].popleft()

    def send(target, value):
        boxes[target].append(value)
        if target in waiting:
            ready.append(waiting.pop(target))

    def ring(rank):
        total = value = rank
        for _ in range(size - 1):
            send((rank + 1) % size, value)
            value = receive(rank)
            total += value
        totals.append(total)

    def stuck(rank):
        receive(rank)

    for program, expected in ((ring, [size * (size - 1) // 2] * size), (stuck, [])):
        totals = []
        fibers = [_spawned(program, rank) for rank in range(size)]
        ready.extend(fibers)
        while ready:
            ready.popleft().switch()
        assert totals == expected
        assert sorted(waiting) == (list(range(size)) if program is stuck else [])
    for fiber in waiting.values():
        throw(fiber, FiberExit)
    assert all(fiber.dead for fiber in fibers)


SCENARIOS = [
    each_fiber_runs_from_pause_to_pause,
    an_exception_is_raised_where_the_fiber_was_switched_to,
    a_fiber_may_catch_what_is_thrown_and_go_on,
    an_exit_runs_finally_and_is_raised_nowhere,
    a_fiber_ends_another_one_and_goes_on,
    context_variables_and_handled_exceptions_are_each_fibers_own,
    a_fiber_begins_with_the_context_that_it_is_given,
    a_fiber_has_no_frames_of_the_program_that_runs_it,
    the_fiber_that_runs_is_known,
    a_scheduler_runs_a_ring_of_fifty_and_finds_the_deadlock,
]
