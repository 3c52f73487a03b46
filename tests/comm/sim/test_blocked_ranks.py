"""A simulated rank that blocks outside of its communicator is reported with its line, and ended where that works."""

import importlib
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from minidist.comm import SimWorld
from minidist.comm.errors import RankTimeoutError

ROOT = Path(__file__).parents[3]
BLOCKS = {
    "time.sleep(60)": "",
    "lock.acquire(); lock.acquire()": "",
    "threading.Event().wait()": "",
    "input()": "",
    "os.read(pipe, 1)": "",
}


def run(statement, prefix=""):
    program = f"""
    import os, signal, sys, threading, time
    from minidist.comm import SimWorld
    lock, (pipe, _) = threading.Lock(), os.pipe()
    {prefix}
    def main(comm):
        comm.barrier()
        if comm.rank == 1:
            {statement}
        comm.barrier()
    try:
        SimWorld(2, timeout=0.4).run(main)
    except BaseException as error:
        print(type(error).__name__, error)
    time.sleep(0.05)
    print("goes on")
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,  # that nothing is written into
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        process.wait(timeout=40)
    finally:
        process.kill()
    return process.stdout.read(), process.stderr.read(), time.monotonic() - began


@pytest.mark.skipif(sys.platform == "win32", reason="a signal ends no wait there")
@pytest.mark.parametrize("statement", BLOCKS)
def test_a_rank_that_blocks_is_ended_and_the_process_goes_on(statement):
    out, err, seconds = run(statement)
    assert "RankTimeoutError rank 1 has been blocked for more than 0.4 s at <string>:9" in out, out + err
    assert "no other rank can run meanwhile" in out
    assert "goes on" in out
    assert err == ""
    assert seconds < 30


def test_a_rank_that_cannot_be_interrupted_is_named_while_it_blocks():
    """A program's handler of SIGINT is left alone, and the rank ends when its wait does."""
    out, err, _ = run("time.sleep(3)", prefix="signal.signal(signal.SIGINT, lambda *_: print('handled'))")
    assert err.count("minidist: rank 1 has been blocked for more than 0.4 s at <string>:9") == 1, out + err
    assert "RankTimeoutError rank 1 computed for more than 0.4 s" in out
    assert "handled" not in out
    assert "goes on" in out


@pytest.mark.parametrize("folder", ["site-packages", "mine"])
def test_what_importing_a_library_takes_is_no_computing(folder, tmp_path, monkeypatch):
    """A module of the program's own may be all of the program, and counts."""
    (tmp_path / folder).mkdir()
    name = f"slow_in_{folder[:4]}"
    (tmp_path / folder / f"{name}.py").write_text(
        "import time\nend = time.time() + (0.6 if 'site' in __file__ else 30)\nwhile time.time() < end: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    world = SimWorld(2, timeout=0.2)
    if folder == "mine":
        with pytest.raises(RankTimeoutError, match=rf"without communicating, at \S*{name}.py:3; it may"):
            world.run(lambda comm: importlib.import_module(name))
    else:
        world.run(lambda comm: importlib.import_module(name) and None)
