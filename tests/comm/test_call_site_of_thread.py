"""A watchdog looks at the frames of a running thread; garbage collected meanwhile must not crash the process."""

import subprocess
import sys

import pytest

# The main thread waits inside a function. The other thread looks at its frames, collects garbage while it does so, and
# the garbage lets the main thread return and use the memory of that function for others.
PROGRAM = """
import gc, sys, threading, time
from minidist.comm.call_site import call_site, call_site_of_thread

LOOK = {"bare": lambda: call_site(sys._current_frames().get(main)), "guarded": lambda: call_site_of_thread(main)}


class Garbage:
    def __init__(self):
        self.me = self

    def __del__(self):
        state["return"] = True
        end = time.time() + 0.2
        while not state["returned"] and time.time() < end:
            time.sleep(0.001)


def watch(look):
    sys._getframe()  # this frame has an object from now on
    for more in range(10):  # one of these thresholds lets the collection come with the frame's object
        gc.disable()
        gc.collect()
        Garbage()
        while not state["inside"]:
            time.sleep(0.001)
        gc.set_threshold(gc.get_count()[0] + more)
        gc.enable()
        look()
        gc.set_threshold(700)
        gc.disable()
        state["return"] = True
        while not state["returned"]:
            time.sleep(0.001)
        state.update({"return": False, "returned": False, "inside": False, "again": True})
    state["end"] = state["again"] = True


def inside(depth):
    if depth:
        return inside(depth - 1)
    state["inside"] = True
    while not state["return"]:
        pass


def overwrite(n, a=1.5, b=2.5, c="x"):
    d = e = f = g = h = i = j = k = l = n * 1.25
    return overwrite(n - 1, d, e) if n else 0


main = threading.get_ident()
state = dict.fromkeys(["inside", "return", "returned", "again", "end"], False)
threading.Thread(target=watch, args=(LOOK[sys.argv[1]],), daemon=True).start()
while not state["end"]:
    state["again"] = False
    inside(20)
    for n in range(60):
        overwrite(n)
    state["returned"] = True
    while not state["again"]:
        pass
print("alive")
"""


def run(how):
    # Under this name the program's frames are not the user's, so that the search for the user's line goes through all.
    program = f"exec(compile({PROGRAM!r}, '<frozen program>', 'exec'))"
    return subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, timeout=60)


def test_the_frames_of_a_running_thread_are_looked_at_without_a_crash():
    done = run("guarded")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions of Python do not collect garbage there")
def test_the_program_crashes_without_the_guard():
    assert run("bare").returncode < 0
