"""Ctrl-C under mpiexec and in the simulated world: one line, exit code 130, within a second, wherever the ranks are.

No rank outlives the launcher that started it.
"""

import os
import re
import signal
import threading
import time

import pytest

from minidist.comm.mpi import interrupts
from minidist.comm.mpi.interrupts import Chance, InterruptWatch
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import place_of

OPEN_MPI = "Open MPI's mpiexec ends the ranks itself, with SIGTERM, and soon after with SIGKILL"
FAILED = 1  # the exit code of Open MPI's mpiexec, whatever those of the ranks are
SECONDS = 5.0  # until the job is over; one second on an idle machine

WHERE = {
    "in Python": "while True:\n        pass",
    "in a sleep": "time.sleep(60)",
    "in MPI": "comm.recv(one(), 1 - comm.rank)",
    "in a new communicator": "comm.dup() if comm.rank else comm.recv(one(), 1)",
    "in a stream": "comm.collective('mine').run_async(lambda: comm.recv(one(), 1 - comm.rank)).wait()",
}


@pytest.mark.parametrize("where", WHERE)
def test_under_mpiexec(run, tmp_path, where):
    code, output, seconds = run.interrupted(
        "ready",
        f"""
def main(comm):
    comm.barrier()
    if comm.rank == 0:
        print('ready', flush=True)
    {WHERE[where]}
""",
        2,
    )
    lines = [line for line in output.splitlines() if line.startswith("minidist:")]
    if not run.open_mpi or lines:  # which kills the ranks after a quarter of a second: on a busy machine too soon
        assert len(lines) == 1, output
        assert re.fullmatch(r"minidist: rank \d of 2: interrupted", lines[0])
    assert "Traceback" not in output
    assert code == (FAILED if run.open_mpi else 130)
    assert seconds < SECONDS
    assert not list(tmp_path.glob("minidist-*"))


def test_simulated(run):
    code, output, seconds = run.interrupted(
        "ready",
        "\ndef main(comm):\n    print('ready', flush=True)\n    while True:\n        comm.barrier()\n",
        1,
        "--ranks",
        "2",
        launcher=False,
    )
    assert [line for line in output.splitlines() if line != "ready"] == ["minidist: interrupted"]
    assert code == 130
    assert seconds < SECONDS


JOB = ["train", "--layers", "2", "--width", "16", "--steps", "100000", "--save", "kept", "--every", "3"]


@pytest.mark.parametrize("world", ["simulated", "mpi"])
def test_a_training_job_says_its_step_and_its_last_checkpoint(run, tmp_path, world):
    code, output, seconds = run.interrupted(
        "1/100000 steps",
        "",
        2,
        launcher=world == "mpi",
        last=f"from minidist.commands.app import main\nmain({JOB + ['--dp', '2']})",
    )
    lines = [line for line in output.splitlines() if line.startswith("minidist:")]
    if run.open_mpi and world == "mpi" and not lines:
        pytest.skip(OPEN_MPI)
    (line,) = lines
    found = re.fullmatch(
        r"minidist: (rank \d of 2: )?interrupted in step (\d+), with \d+ of 100000 steps done; "
        r"(no checkpoint was written yet to kept"
        r"|the last checkpoint has (\d+) steps and is in kept; --resume goes on from it)",
        line,
    )
    assert found, output
    assert (found[1] is None) == (world == "simulated")
    step, saved = int(found[2]), int(found[4] or 0)
    assert saved in (step - step % 3, step + 1 - (step + 1) % 3)  # it may have been interrupted in the saving
    if saved:
        assert (tmp_path / "kept" / f"step-{saved:08d}").is_dir()
    assert code == (FAILED if run.open_mpi and world == "mpi" else 130)
    assert seconds < SECONDS
    assert "Traceback" not in output


def test_what_a_job_says_of_its_place():
    config = TrainConfig(steps=9)
    assert (
        place_of(config, 0, 0)
        == "step 0, with 0 of 9 steps done; nothing was saved, --save DIRECTORY writes checkpoints"
    )
    config = TrainConfig(steps=9, save="kept")
    assert place_of(config, 1, 0) == "step 1, with 1 of 9 steps done; no checkpoint was written yet to kept"
    assert place_of(config, 4, 3).endswith("the last checkpoint has 3 steps and is in kept; --resume goes on from it")


def test_a_program_may_catch_it(run):
    """To write a checkpoint, for example: the watch leaves the main program alone that was interrupted."""
    if run.open_mpi:
        pytest.skip(OPEN_MPI)
    code, output, _ = run.interrupted(
        "ready",
        """
def main(comm):
    try:
        print('ready', flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(1)
        print("saved", flush=True)
""",
        1,
    )
    assert code in (0, 130), output
    assert "saved" in output
    assert "minidist: " not in output


def test_a_rank_that_waits_in_mpi_leaves_the_others_the_time_to_save(run):
    if run.open_mpi:
        pytest.skip(OPEN_MPI)
    _, output, _ = run.interrupted(
        "ready",
        """
def main(comm):
    try:
        comm.barrier()
        if comm.rank == 0:
            comm.recv(one(), 1)
        time.sleep(0.5)  # rank 0 is in MPI, if the machine is not loaded
        print('ready', flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(2)
        print("saved by", comm.rank, flush=True)
""",
        2,
    )
    assert "saved by 1" in output


class FakeWorld:
    """What a watch asks, and which of its calls end the job."""

    def __init__(self, waits=True):
        self.waits, self.others_compute = waits, False
        self.rank, self.folder = 0, self
        self.interrupted, self.terminated, self.orphaned = (threading.Event() for _ in range(3))
        self.end_interrupted, self.end_terminated = self.interrupted.set, self.terminated.set
        self.end_orphaned = self.orphaned.set

    def waits_in_mpi(self):
        return self.waits

    def note_interrupt(self, rank, computes):
        return self.others_compute


@pytest.fixture
def watched(monkeypatch):
    """A world and its watch, which looks more often than others."""
    monkeypatch.setattr(interrupts, "GRACE", 0.1)
    monkeypatch.setattr(interrupts, "LOOK", 0.01)
    world = FakeWorld()
    world.watch = InterruptWatch(world)
    yield world
    world.watch.stop()


def signal_is_noted(watch):
    """Do what Python's handler in C does, and not what it does in the main program: that one cannot be interrupted."""
    watch.sender.send(bytes([signal.SIGINT]))


def test_a_program_that_waits_in_mpi_is_ended(watched):
    signal_is_noted(watched.watch)
    assert watched.interrupted.wait(5)


def test_a_program_that_is_kept_from_running_is_left_alone(watched, monkeypatch):
    """On a loaded machine it is ready to run, for seconds perhaps, and will be interrupted when it does."""
    monkeypatch.setattr(Chance, "_seconds", lambda chance: 0.0)
    monkeypatch.setattr(Chance, "_is_asleep", lambda chance: False)
    signal_is_noted(watched.watch)
    assert not watched.interrupted.wait(1)
    monkeypatch.undo()
    assert watched.interrupted.wait(5)


def test_other_ranks_that_still_compute_are_waited_for(watched):
    watched.others_compute = True
    signal_is_noted(watched.watch)
    assert not watched.interrupted.wait(0.5)
    watched.others_compute = False
    assert watched.interrupted.wait(5)


def test_a_program_is_woken_whose_signal_another_thread_has_got(watched):
    watched.waits = False
    signal_is_noted(watched.watch)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)
    assert not watched.interrupted.is_set()


def test_a_program_that_saves_is_woken_only_once(watched):
    watched.waits = False
    with pytest.raises(KeyboardInterrupt):
        interrupt_myself()
    watched.watch.repeated = True
    interrupt_myself(0.1)  # what `InterruptWatch` sends when it looks just before the exception is raised
    with pytest.raises(KeyboardInterrupt):
        interrupt_myself()  # Ctrl-C again


def test_the_launcher_of_a_program_that_saves_may_end(watched, monkeypatch):
    watched.waits, watched.watch.launched = False, True
    with pytest.raises(KeyboardInterrupt):
        interrupt_myself()
    monkeypatch.setattr(os, "getppid", lambda: 1)  # which is looked at soon after Ctrl-C
    assert not watched.orphaned.wait(0.3)
    watched.waits = True
    assert watched.orphaned.wait(5)


def test_a_handler_of_the_user_s_own_stays():
    mine = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        watch = InterruptWatch(FakeWorld())
        assert not watch.active
        watch.stop()
    finally:
        signal.signal(signal.SIGINT, mine)


def interrupt_myself(seconds=5):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(seconds)


def test_signals_are_as_before_when_the_watch_ends(watched):
    assert watched.watch.active
    with pytest.raises(KeyboardInterrupt):
        interrupt_myself()
    assert not watched.interrupted.wait(0.3)  # it was raised, so the watch does nothing
    watched.watch.stop()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("open_mpi", [False, True])
def test_the_signal_that_open_mpi_makes_of_ctrl_c(monkeypatch, open_mpi):
    """Any other launcher's SIGTERM ends the process as it always did."""
    monkeypatch.setattr(interrupts, "started_by_open_mpi", lambda: open_mpi)
    world = FakeWorld()
    watch = InterruptWatch(world)
    try:
        if open_mpi:
            os.kill(os.getpid(), signal.SIGTERM)
            assert world.terminated.wait(5)
        else:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        watch.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.skipif(not os.path.exists("/proc/self/comm"), reason="Linux only")
def test_what_is_said_past_the_launcher(monkeypatch, capfd):
    """It is added to what the launcher has written, which may go into a file."""
    with open("/proc/self/comm") as file:
        name = file.read().strip()
    monkeypatch.setattr(os, "getppid", os.getpid)
    os.write(2, b"before, ")
    interrupts.say_past_the_launcher("interrupted\n", (name,))
    assert capfd.readouterr().err == "before, interrupted\n"


def lives(pid):
    """Return whether a process runs; one that has ended may be kept for a parent that never asks."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


LAUNCHED = {"watched": "launch(main)", "without a limit": "sys.argv += ['--timeout', '0']\nlaunch(main)"}


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="Linux only")
@pytest.mark.parametrize("how", LAUNCHED)
def test_no_rank_outlives_its_launcher(run, tmp_path, how):
    """The process that starts the ranks is killed while they wait in MPI, for ever as far as they know."""
    run.ended(
        """
def main(comm):
    print(os.getpid(), file=open(f"pid{comm.rank}", "w"), flush=True)
    sys.stderr = open(f"errors{comm.rank}", "w")
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getppid(), 9)
    comm.recv(one(), 1 - comm.rank, 3)
""",
        2,
        last=LAUNCHED[how],
        timeout=30,
    )
    until = time.monotonic() + 20
    for rank in range(2):
        while lives(int((tmp_path / f"pid{rank}").read_text())) and time.monotonic() < until:
            time.sleep(0.1)
        assert time.monotonic() < until
        assert (tmp_path / f"errors{rank}").read_text() == (
            f"minidist: rank {rank} of 2: the launcher that started it has ended, and so it ends; it waits in receive"
            f" from rank {1 - rank}, tag 3, 8 B, at program.py:{run.line('comm.recv(one()')}; start the job again\n"
        )
    assert not list(tmp_path.glob("minidist-*"))


@pytest.mark.parametrize("variable", [None, "MINIDIST_RANK", "PMI_RANK"])
def test_a_program_that_no_launcher_started_outlives_its_shell(monkeypatch, variable):
    """Also one whose rank and size the user has set, and that handles Ctrl-C itself."""
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(interrupts, "INTERVAL", 0.05)
    mine = signal.signal(signal.SIGINT, lambda *_: None)
    world = FakeWorld()
    watch = InterruptWatch(world)
    try:
        assert not world.orphaned.wait(0.2)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert world.orphaned.wait(5 if variable == "PMI_RANK" else 0.3) == (variable == "PMI_RANK")
    finally:
        watch.stop()
        signal.signal(signal.SIGINT, mine)
