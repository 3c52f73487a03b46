"""The watchdog's thread outlives odd values, a full disk and a folder that is gone, and it says what it can."""

import os
import re
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from greenlet import getcurrent

from minidist.base.traces import Trace
from minidist.comm.mpi import ending, job_folder, waits
from minidist.comm.mpi import watchdog as watchdog_module
from minidist.comm.mpi import world as mpi_world
from minidist.comm.mpi.job_folder import JobFolder, make_job_folder, remove_old_folders
from minidist.comm.mpi.waits import Returned
from minidist.comm.mpi.watchdog import Watchdog
from tests.cases import each


class FakeWorld:
    """What a watchdog looks at of rank `rank` of 2."""

    def __init__(self, rank=0):
        self.rank, self.size = rank, 2
        self.state, self.place, self.completed = "computing", "", 0
        self.waiting = self.handling = None
        self.active, self.trace, self.main, self.logs = [], Trace(rank, 2), getcurrent(), {}
        self.made = {}
        self.aborted = threading.Event()
        self.abort = lambda code: self.aborted.set()
        self.thread = threading.get_ident()


def returned(rank):
    """A world whose program is over, so that the watchdog reports after its timeout."""
    world = FakeWorld(rank)
    world.state, world.waiting = "returned", Returned()
    return world


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


def put_a_file_there(folder):
    with suppress(IsADirectoryError):  # the watchdog may have made it again
        folder.discard()
        folder.path.write_text("somebody else's")
        return
    put_a_file_there(folder)


TROUBLES = {
    "the folder is removed": lambda watchdog, patch: watchdog.folder.discard(),
    "the folder is a file": lambda watchdog, patch: put_a_file_there(watchdog.folder),
    "the disk is full": lambda watchdog, patch: patch.setattr(job_folder.Path, "write_text", no_space),
    "a state that JSON does not know": lambda watchdog, patch: patch.setattr(
        watchdog_module, "state_of", lambda *_: {"rank": 0, "state": "returned", "peers": {0}, "what": object()}
    ),
    "a state that cannot be made": lambda watchdog, patch: patch.setattr(waits, "_site", lambda world: 1 / 0),
    "messages that cannot be written": lambda watchdog, patch: patch.setattr(
        JobFolder, "append_messages", lambda *_: False
    ),
}


@each("trouble", TROUBLES)
def test_a_hang_is_reported_whatever_happens_to_the_files(trouble, tmp_path, monkeypatch, capfd):
    world = returned(0)
    watchdog = Watchdog(world, 0.4, JobFolder(str(tmp_path / "job")))
    TROUBLES[trouble](watchdog, monkeypatch)
    assert world.aborted.wait(10)
    watchdog.thread.join(10)
    report = capfd.readouterr().err
    assert "minidist: no progress on rank 0 for 0.4 s (--timeout); every rank's pending operation:" in report
    assert "rank 0: has returned, and waits for the others to finish" in report
    assert "rank 1: unknown" in report


def test_a_report_that_fails_is_short_and_still_ends_the_job(tmp_path, monkeypatch, capfd):
    world = returned(0)
    watchdog = Watchdog(world, 0.2, JobFolder(str(tmp_path / "job")))
    monkeypatch.setattr(watchdog, "text", lambda: 1 / 0)
    assert world.aborted.wait(10)
    assert "because the report failed (ZeroDivisionError)" in capfd.readouterr().err


def test_a_folder_that_was_cleaned_is_made_again(tmp_path):
    folder = JobFolder(str(tmp_path / "job"))
    folder.discard()
    folder.write_state(3, {"state": "computing"})
    assert folder.state(3) == {"state": "computing"}
    folder.discard()
    assert folder.first("reported")
    assert not folder.first("reported")


@pytest.mark.parametrize("removed", [False, True])
def test_a_rank_that_ends_after_another_lets_that_one_end_the_job(removed, tmp_path, monkeypatch, capfd):
    """The first one has said it for both and has removed the folder, in which it noted so."""
    slept = []
    monkeypatch.setattr(mpi_world, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(mpi_world, "abort", lambda code: None)
    folder = JobFolder(str(tmp_path / "job"))
    if removed:
        folder.discard()
    mpi_world.MPIWorld.end(SimpleNamespace(folder=folder, watchdog=None), "minidist: why", 1)
    assert slept == [0.5] * removed + [0.2]
    assert capfd.readouterr().err == "minidist: why\n"  # nobody has ended this process meanwhile


def test_two_threads_that_write_at_once_do_not_take_each_other_s_file(tmp_path, monkeypatch):
    """The main program writes, too, when it ends the job: both rename the same temporary file."""
    world, inside, most = FakeWorld(), [], []
    watchdog = Watchdog(world, 60, JobFolder(str(tmp_path / "job")))

    def slowly(*_):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()

    monkeypatch.setattr(watchdog.folder, "write_state", slowly)
    threads = [threading.Thread(target=watchdog.write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watchdog.stop()
    assert max(most) == 1


def test_half_a_line_of_a_full_disk_is_taken_back(tmp_path):
    folder = JobFolder(str(tmp_path / "job"))

    def until_full():
        yield {"tag": 1}
        no_space()

    assert folder.append_messages(0, [{"tag": 0}])
    assert not folder.append_messages(0, until_full())
    assert folder.append_messages(0, [{"tag": 1}])
    assert [message["tag"] for message in folder.messages(0)] == [0, 1]


def test_without_a_folder_there_are_no_files_and_no_errors(monkeypatch):
    monkeypatch.setattr(job_folder.tempfile, "mkdtemp", no_space)
    assert make_job_folder() is None
    folder = JobFolder(None)
    folder.write_state(0, {})
    assert (folder.state(0), folder.messages(0), folder.first("reported")) == (None, [], True)
    assert (folder.append_messages(0, [{"tag": 1}]), folder.is_gone()) == (False, False)
    folder.leave(0)
    folder.discard()


def test_only_old_folders_of_ours_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(job_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    for name, file in [("old", "rank0.json"), ("new", "rank0.json"), ("theirs", "thesis.tex")]:
        (tmp_path / f"minidist-run-{name}").mkdir()
        (tmp_path / f"minidist-run-{name}" / file).write_text("{}")
    week_ago = time.time() - 8 * 86400
    for name in ("old", "theirs"):
        os.utime(tmp_path / f"minidist-run-{name}", (week_ago, week_ago))
    remove_old_folders()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["minidist-run-new", "minidist-run-theirs"]


# --- all ranks compute ------------------------------------------------------------------------------------------------


def write_other(folder, **state):
    folder.write_state(1, {"rank": 1, "state": "computing", "peers": [], "what": "computing at b.py:2", **state})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"silence": 100.0}, True),
        ({"silence": 0.0}, False),  # it has sent something lately
        ({"state": "waiting", "what": "receive"}, False),  # its own watchdog reports
    ],
)
def test_ranks_that_all_compute_for_long_are_said_and_go_on(other, said, tmp_path, capfd):
    folder = JobFolder(str(tmp_path / "job"))
    write_other(folder, **other)
    watchdog = Watchdog(FakeWorld(), 0.3, folder)
    time.sleep(0.8)
    watchdog.stop()
    lines = capfd.readouterr().err.splitlines()
    assert not watchdog.world.aborted.is_set()
    if not said:
        assert lines == []
        return
    assert re.fullmatch(
        r"minidist: all ranks have computed for \d s without a message \(--timeout\); the job goes on, Ctrl-C ends it:",
        lines[0],
    )
    assert lines[1].startswith("  rank 0: computing at ")
    assert lines[2] == "  rank 1: computing at b.py:2"


@pytest.mark.parametrize("other", ["alive", "gone", "stopped"])
def test_the_end_of_a_job_waits_for_ranks_that_live(other, tmp_path, monkeypatch, capfd):
    """Rank 0 may draw pictures for longer than the timeout while the others wait for it in MPI_Finalize."""
    ended = threading.Event()
    monkeypatch.setattr(ending, "os", SimpleNamespace(_exit=lambda code: ended.set()))
    folder = JobFolder(str(tmp_path / "job"))
    folder.write_state(1, {"rank": 1, "state": "ended", "peers": []})
    mine = ending.Ending(folder, 0, 2, 0.4)
    second = ending.Ending(folder, 1, 2, 0.4) if other == "alive" else None
    if other == "gone":
        folder.leave(1)
    mine.wait_for_all()
    assert ended.wait(3 if other == "stopped" else 1) is (other == "stopped")
    for one in filter(None, (mine, second)):
        one.leave()
    assert not folder.path.exists()
    assert ("rank 1 of 2 has given no sign of life for 0.4 s" in capfd.readouterr().err) is (other == "stopped")


def test_a_rank_that_comes_to_another_step_is_not_silent(tmp_path, capfd):
    """A single rank sends nothing at all, and trains for hours."""
    world = FakeWorld()
    world.size = 1
    watchdog = Watchdog(world, 0.4, JobFolder(str(tmp_path / "job")))
    for step in range(8):
        world.place = f"step {step}"
        time.sleep(0.15)
    watchdog.stop()
    assert capfd.readouterr().err == ""


def test_all_ranks_compute_without_end(run):
    """Under mpiexec: both ranks are named, and the job goes on to its end."""
    program = """
def main(comm):
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
"""
    output = run(program, 2, "--timeout", "0.4")
    assert "all ranks have computed for" in output, output
    for rank in range(2):
        assert re.search(rf"rank {rank}: computing at \S*program.py:({run.line('while')}|{run.line('pass')})", output)


# --- streams that are busy --------------------------------------------------------------------------------------------


def test_a_stream_that_goes_on_is_no_hang(run):
    """The main program waits in one work for longer than the timeout, and the work's messages come one by one."""
    program = """
def receive_all(call):
    for _ in range(8):
        call.recv(one(), 1)
def main(comm):
    call = comm.collective("mine")
    if comm.rank == 0:
        call.run_async(lambda: receive_all(call)).wait()
    else:
        for _ in range(8):
            time.sleep(0.25)
            call.send(one(), 0)
"""
    run(program, 2, "--timeout", "1")


# --- under mpiexec ----------------------------------------------------------------------------------------------------


def test_a_rank_of_numpy_s_and_a_working_directory_that_is_gone(run):
    program = """
def main(comm):
    os.makedirs(str(comm.rank))
    os.chdir(str(comm.rank))
    os.rmdir(os.getcwd())
    comm.recv(one(), np.int64(1 - comm.rank))
"""
    output = run(program, 2, "--timeout", "1", code=None)
    for rank in range(2):
        assert f"rank {rank}: waits in receive from rank {1 - rank}, tag 0, 8 B, at" in output, output
    assert "circle: rank 0 -> rank 1 -> rank 0" in output


# --- what is left in the temporary directory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end", ["raise KeyError(1)", "sys.exit(3)", "comm.send(one(), 7)", "comm.world.kill(comm.rank)", "sys.exit()"]
)
def test_a_job_that_ends_by_itself_leaves_no_folder(run, tmp_path, end):
    run.ended(
        f"\ndef main(comm):\n    comm.barrier()\n    if comm.rank == 1 or {end!r}.endswith('()'):\n        {end}\n", 2
    )
    assert not list(tmp_path.glob("minidist-*"))


def test_a_report_s_folder_is_there(run, tmp_path):
    program = "\ndef main(comm):\n    comm.barrier()\n    comm.recv(one(), comm.rank)\n"
    output = run(program, 2, "--timeout", "1", code=None)
    (folder,) = tmp_path.glob("minidist-*")
    assert f"traces so far: {folder}/rank*.trace.jsonl" in output
    assert len((folder / "rank0.trace.jsonl").read_text().splitlines()) == 3


def test_a_report_where_mpi_abort_returns_ends_the_rank(run):
    """As where the launcher is gone: nobody but the rank itself ends its process."""
    output = run(
        """
import types, mpi4py
from mpi4py import MPI
class WithoutAbort:
    COMM_WORLD = types.SimpleNamespace(Abort=lambda code: None)
    def __getattr__(self, name):
        return getattr(MPI, name)
def main(comm):
    mpi4py.MPI = comm.world.MPI = WithoutAbort()
    comm.recv(one(), 0)
""",
        1,
        "--timeout",
        "1",
        timeout=30,
        code=1,
    )
    assert "rank 0: waits in receive from rank 0" in output
