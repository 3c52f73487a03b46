"""One job at a time saves into a directory: the second is refused, and the lock does not survive its process."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from minidist.comm import SimWorld
from minidist.comm.launcher import mpiexec_command
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Storage, storage
from minidist.job.checkpoint.resume import saving_alone
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from tests.checkpoint.test_directory import assert_holds, write

HOLD = """
import sys, time
from pathlib import Path
from minidist.job.checkpoint import Storage
with Storage().locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(Storage, "patience", 0.2)


def test_the_second_job_is_refused_and_a_killed_one_holds_nothing(holder, tmp_path):
    with pytest.raises(UsageError, match=rf"another job saves into .*\(process {holder.pid} on .*another directory"):
        SimWorld(2).run(write, tmp_path, 1)
    assert not (tmp_path / "latest").exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    SimWorld(2).run(write, tmp_path, 1)
    assert_holds(tmp_path, 1)


def test_a_job_holds_the_lock_from_its_first_step_to_its_last(tmp_path):
    config = TrainConfig.make(model="mlp", width=8, layers=1, steps=2, every=1, save=str(tmp_path))
    refused = []

    def another(state):
        if state.rank == 0:
            with pytest.raises(UsageError, match="another job saves"), Storage().locked(tmp_path):
                pass
            refused.append(state.step)

    SimWorld(2).run(train, config, [another])
    assert refused == [0, 1]
    with Storage().locked(tmp_path):
        pass


def test_ranks_other_than_0_hold_nothing(tmp_path):
    def main(comm):
        with saving_alone(comm, TrainConfig.make(save=str(tmp_path))):
            comm.barrier()

    SimWorld(3).run(main)


def test_a_killed_job_that_has_not_ended_yet_is_waited_for(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(Storage, "patience", 20.0)
    threading.Timer(0.2, holder.kill).start()
    with Storage().locked(tmp_path):
        pass


def test_jobs_that_save_at_once_without_locks_do_not_mix_their_files(tmp_path, monkeypatch):
    """On a file system without locks, saves of two jobs overlap; each is complete, with its own values."""
    monkeypatch.setattr(storage, "fcntl", None)
    meeting = threading.Barrier(2, timeout=10)

    class Slow(Storage):
        def make(self, path):
            super().make(path)
            meeting.wait()

    # Both have made their folders before either of them writes a file.
    jobs = [threading.Thread(target=SimWorld(2).run, args=(write, tmp_path, version, Slow())) for version in (1, 2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    for version in (1, 2):
        (tmp_path / "latest").write_text(f"step-0000000{version}")
        assert_holds(tmp_path, version)


def test_a_list_of_another_save_is_refused(tmp_path):
    class Foreign(Storage):
        def write(self, path, data):
            super().write(path, data.replace(b'"save": ".saving-', b'"save": "x') if path.suffix == ".json" else data)

    with pytest.raises(UsageError, match=r"rank-0000\.json was written by another save than rank 0's"):
        SimWorld(1).run(write, tmp_path, 1, Foreign())


FIRST = """
import sys, time
from pathlib import Path
from minidist.comm import launch
from minidist.job.checkpoint.resume import saving_alone
from minidist.job.config.train_config import TrainConfig
def main(comm):
    with saving_alone(comm, TrainConfig.make(save=sys.argv[1])):
        comm.barrier()
        Path(sys.argv[1], f"rank-{comm.rank}").touch()
        time.sleep(60)
launch(main, argv=[])
"""


@pytest.mark.exhaustive
def test_two_jobs_under_mpiexec(tmp_path):
    pytest.importorskip("mpi4py")
    command, environment = mpiexec_command(2, ["-c", FIRST, str(tmp_path)])
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "rank-0").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        job = ["-m", "minidist", "train", "--dp", "2", "--model", "mlp", "--width", "8", "--save", str(tmp_path)]
        command, environment = mpiexec_command(2, [*job, "--steps", "3", "--overwrite"])
        second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    finally:
        os.kill(first.pid, signal.SIGTERM)
        first.wait()
    assert second.returncode == 2
    assert "another job saves into" in second.stderr
    assert "Traceback" not in second.stderr


def test_a_system_that_opens_no_directory_renames_all_the_same(tmp_path, monkeypatch):
    """Windows refuses to open one, so there is nothing to wait for."""

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "new").write_text("content")
    monkeypatch.setattr(storage.os, "open", refuse)
    Storage().rename(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "content"
