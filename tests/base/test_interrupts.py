"""Ctrl-C ends a run, also where Python cannot raise it: in a callback of a weak reference, in a destructor."""

import os
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest

from minidist.base.interrupts import interruptible, interruption
from minidist.base.memory import MemoryAccount, account_memory
from minidist.comm import SimWorld
from minidist.commands import app
from minidist.core.base.trace import track


class Thing:
    """Something that can be weakly referenced."""


def interrupted_in_a_callback(monkeypatch):
    def callback(_):
        raise KeyboardInterrupt

    thing = Thing()
    reference = weakref.ref(thing, callback)
    del thing
    assert reference() is None


def interrupted_in_a_destructor(monkeypatch):
    class Interrupted:
        def __del__(self):
            raise KeyboardInterrupt

    Interrupted()


def interrupted_in_the_memory_account(monkeypatch):
    def change(self, purpose, nbytes):
        if nbytes < 0:
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(MemoryAccount, "change", change)
    with account_memory():
        track(np.ones(3), "activation")


@pytest.mark.parametrize(
    "interrupt", [interrupted_in_a_callback, interrupted_in_a_destructor, interrupted_in_the_memory_account]
)
def test_an_interrupt_that_python_drops_ends_the_run_all_the_same(interrupt, monkeypatch):
    def program(comm):
        if comm.rank:
            interrupt(monkeypatch)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            comm.barrier()

    # Seconds of computing, which other processes do not change; the program takes ten.
    before, began = sys.unraisablehook, time.process_time()
    with pytest.raises(KeyboardInterrupt):
        SimWorld(2).run(program)
    assert time.process_time() - began < 1
    assert sys.unraisablehook is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_errors_that_python_drops_go_their_old_way(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))

    class Wrong:
        def __del__(self):
            raise ZeroDivisionError

    with interruptible():
        Wrong()
    assert seen == [ZeroDivisionError]


def test_what_is_said():
    assert interruption("") == "interrupted"
    assert interruption("step 3 of 10") == "interrupted in step 3 of 10"


@pytest.mark.parametrize("module", ["minidist.comm", "minidist.commands.train"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_while_the_program_is_imported_it_ends_at_once_and_one_process_says_so(rank, module):
    """A KeyboardInterrupt inside an import is a traceback of ours, or a crash of the library that is imported."""
    code = (
        "import os, signal, sys, runpy\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == '{module}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.argv[1:] = ['train']\n"
        "runpy.run_module('minidist', run_name='__main__')\n"
    )
    environment = {**os.environ, "PMI_RANK": rank}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr == ("minidist: interrupted at the start\n" if rank == "0" else "")


def test_while_the_command_line_is_parsed(monkeypatch, capsys):
    """Ctrl-C there is one line, and a second one does not disturb the end."""

    def interrupted(words):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(app, "run_words", interrupted)
    with pytest.raises(SystemExit) as end:
        app.main(["doctor"])
    ignored = signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert capsys.readouterr().err == "minidist: interrupted\n"
    assert ignored is signal.SIG_IGN
