"""Fibers: programs in one thread that run until they pause, as ranks of the simulated world and asynchronous works do.

They are greenlets. Pyodide has none: there, minidist/base/promise_fibers.py has fibers with the same interface.

    hub = current()                                    what runs now
    fiber = spawn(program, argument, context, hub)     nothing runs yet; control goes to the hub when it ends
    fiber.switch()        called on the hub: run it until it pauses or ends; raises what it raises
    hub.switch()          called in a fiber: pause
    DIRECT                whether switch() may be called in another fiber, too, which then pauses
    throw(fiber, error)   raise `error` where the fiber has paused, and return when it has ended; FiberExit ends it and
                          is not raised here. A fiber that is thrown at by another one must not pause again
    fiber.dead            whether it has ended
    fiber.gr_frame        the frame in which it has paused; None where it is not known, as in Pyodide

Proved by: tests/base/test_fibers.py
"""

import sys
from collections.abc import Callable
from contextvars import Context
from typing import Any

from minidist.core.base import hooks

__all__ = ["DIRECT", "Fiber", "FiberExit", "current", "spawn", "throw"]

if sys.platform == "emscripten":
    DIRECT = False
    backend = hooks.fibers()
    Fiber, FiberExit = backend.Fiber, backend.FiberExit
    current, spawn, throw = backend.current, backend.spawn, backend.throw
else:
    from functools import partial

    from greenlet import GreenletExit as FiberExit
    from greenlet import getcurrent as current
    from greenlet import greenlet as Fiber

    DIRECT = True

    def spawn(program: Callable[[Any], None], argument: Any, context: Context, hub: Fiber) -> Fiber:
        """Return a fiber that will run `program(argument)` in a separate context."""
        fiber = Fiber(partial(program, argument), parent=hub)
        fiber.gr_context = context
        return fiber

    def throw(fiber: Fiber, error: type[BaseException] | BaseException) -> None:
        """Raise `error` in a fiber that has paused."""
        fiber.parent = current()  # where control goes when it has ended
        fiber.throw(error)
