"""Fibers on JavaScript promises, for Pyodide: WebAssembly cannot exchange stacks itself, but its host can suspend one.

`run_sync(promise)` suspends the stack of the caller until the promise is resolved, and the host runs another one
meanwhile. So each fiber and each caller of `switch` wait for separate promises:

    switch:  resolve the fiber's promise, or start its stack ──▶ wait for the promise of the return
    pause:   resolve the promise of the return               ──▶ wait for the fiber's own promise

The host needs JavaScript Promise Integration: Chrome or Edge 137 and newer, Node with --experimental-wasm-jspi (24) or
--experimental-wasm-stack-switching (20). The program must run in `runPythonAsync`, since a stack that plain JavaScript
has entered cannot be suspended. Pyodide has neither greenlets nor threads, so minidist/core/base/fibers.py uses the
fibers of this module where `sys.platform` is "emscripten". The package greenlet-pyodide does the same behind greenlet's
whole interface; it has had one release, and minidist needs three functions.

Proved by: tests/base/test_fibers.py
"""

import importlib
from collections.abc import Callable
from contextvars import Context
from functools import partial
from types import FrameType
from typing import Any

from minidist.core.base.errors import UsageError


class FiberExit(BaseException):
    """Ends a fiber. Not an Exception, so that no `except Exception` catches it."""


class Fiber:
    """A program with a separate stack."""

    # A suspended stack is not in memory, and Python's frames refer to it: following their links would read garbage.
    gr_frame: FrameType | None = None

    def __init__(self, body: Callable[[], None]) -> None:
        self.body = body
        self.started = self.dead = False
        self.caller: Fiber | None = None
        self.proxy: Any = None  # JavaScript's reference to `_body`
        self.resume: Any = None  # resolves the promise that the paused fiber waits for
        self.give_back: Any = None  # resolves the promise that `switch` waits for
        self.thrown: BaseException | None = None
        self.raised: BaseException | None = None

    def switch(self) -> None:
        """Run until the fiber pauses or ends; called in a fiber that this one runs: pause."""
        global _running
        if self is _running.caller:
            _running.pause()
            return
        host = _host()
        returned, self.give_back = host.deferred()
        self.caller, _running = _running, self
        if self.started:
            self.resume()
        else:
            self.started = True
            self.proxy = host.create_proxy(self._body)
            host.start(self.proxy)

        # The fiber's stack runs when this one is suspended.
        host.run_sync(returned)
        assert self.caller is not None
        _running = self.caller
        if self.dead and self.proxy is not None:
            self.proxy.destroy()
            self.proxy = None
        if self.raised is not None:
            error, self.raised = self.raised, None
            raise error

    def pause(self) -> None:
        """Return to the caller of `switch`, and wait for the next one."""
        host = _host()
        resumed, self.resume = host.deferred()
        self.give_back()
        host.run_sync(resumed)
        if self.thrown is not None:
            error, self.thrown = self.thrown, None
            raise error

    def _body(self) -> None:
        """The whole life of the fiber, on its own stack. Nothing is raised into JavaScript."""
        try:
            self.body()
        except FiberExit:
            pass
        except BaseException as error:
            self.raised = error
        self.dead = True
        self.give_back()


_running = Fiber(lambda: None)  # what runs; at first the program that has started all


def current() -> Fiber:
    """Return the fiber that runs."""
    return _running


def spawn(program: Callable[[Any], None], argument: Any, context: Context, hub: Fiber) -> Fiber:
    """Return a fiber that will run `program(argument)` in a separate context."""
    return Fiber(partial(context.run, program, argument))


def throw(fiber: Fiber, error: type[BaseException] | BaseException) -> None:
    """Raise `error` in a fiber that has paused."""
    thrown = error() if isinstance(error, type) else error
    if fiber.started and not fiber.dead:
        fiber.thrown = thrown
        fiber.switch()
        return

    # There is no place where it could be raised.
    fiber.dead = True
    if not isinstance(thrown, FiberExit):
        raise thrown


class _Host:
    """What Pyodide offers: promises, stacks and waiting."""

    def __init__(self) -> None:
        ffi, code = importlib.import_module("pyodide.ffi"), importlib.import_module("pyodide.code")
        if not ffi.can_run_sync():
            raise UsageError(
                "simulated ranks in Pyodide need a host with JavaScript Promise Integration (Chrome or Edge 137 or"
                " newer, Node 24 with --experimental-wasm-jspi) and a program started with runPythonAsync; this one"
                " cannot be suspended"
            )
        self.run_sync, self.create_proxy = ffi.run_sync, ffi.create_proxy
        # In a step of the host's own, so that the stack of the fiber has no frames of its starter below.
        self.start = code.run_js("(body) => { queueMicrotask(() => body.callPromising()); }")
        self._deferred = code.run_js("() => { let done; return [new Promise((first) => { done = first; }), done]; }")

    def deferred(self) -> tuple[Any, Any]:
        """Return a promise and the function that resolves it."""
        promise, resolve = self._deferred()
        return promise, resolve


_found: _Host | None = None


def _host() -> _Host:
    global _found
    if _found is None:
        _found = _Host()
    return _found
