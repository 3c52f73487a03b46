"""When a process is killed at any moment of a save, the previous checkpoint still loads."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Checkpoint, Storage, rank_state_shards, read_rank_state, save
from tests.cases import each
from tests.checkpoint.test_directory import assert_holds, write


class Deadly(Storage):
    """Kills this process (SIGKILL) at moment `at`: around every call that changes the disk, and in the middle of a
    write.
    """

    def __init__(self, at):
        self.at, self.count = at, 0

    def moment(self):
        self.count += 1
        if self.count - 1 == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def make(self, path):
        self.moment()
        super().make(path)

    def write(self, path, data):
        self.moment()
        path.write_bytes(data[: len(data) // 2])
        self.moment()
        super().write(path, data)

    def sync(self, descriptor):
        self.moment()
        super().sync(descriptor)

    def remove(self, path):
        self.moment()
        super().remove(path)

    def rename(self, source, target):
        self.moment()
        super().rename(source, target)
        self.moment()


def in_a_process(function):
    """The exit status of a forked process that runs it (negative: the signal that ended it), as subprocess counts."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)  # no teardown of the parent's test session
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_process_leaves_the_checkpoint_before_it(tmp_path):
    SimWorld(2).run(write, tmp_path, 1)
    survived = []
    for at in range(100):
        storage = Deadly(at)
        status = in_a_process(lambda storage=storage: SimWorld(2).run(write, tmp_path, 2, storage))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        now = (tmp_path / "latest").read_text()
        survived.append(now != "step-00000001")
        assert_holds(tmp_path, 2 if survived[-1] else 1)
    # make; six files written (before, half way, before their sync); two lists removed; two renames (before, before
    # their
    # sync, after): the last two moments come after `latest` was replaced.
    assert at == 1 + 6 * 3 + 2 + 2 * 3 == len(survived)
    assert survived == [False] * (at - 2) + [True] * 2
    assert_holds(tmp_path, 2)


@pytest.mark.exhaustive
def test_a_rank_killed_under_mpiexec(tmp_path):
    """Rank 1 dies in the middle of its file; the launcher ends the job, and what was there before loads."""
    pytest.importorskip("mpi4py")
    import subprocess

    from minidist.comm.launcher import mpiexec_command

    SimWorld(2).run(write, tmp_path, 1)
    code = (
        "import sys; from minidist.comm import launch; from tests.checkpoint import test_killed as t; "
        f"launch(lambda comm: t.write(comm, t.Path({str(tmp_path)!r}), 2, t.Deadly(1) if comm.rank == 1 else None))"
    )
    command, environment = mpiexec_command(2, ["-c", code])
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode != 0
    assert_holds(tmp_path, 1)


# state of a rank -----------------------------------------------------------------------------------------------------


def residual(rank):
    return np.random.default_rng(rank).standard_normal(7)


def saved(directory, ranks):
    def main(comm):
        save(comm, directory, 1, rank_state_shards(comm.rank, {"residual/w": residual(comm.rank)}), {})

    SimWorld(ranks).run(main)
    return Checkpoint(directory)


@each("before", [1, 2, 3, 5])
@each("after", [1, 2, 3, 4, 8])
def test_residuals_keep_their_sum_on_any_number_of_ranks(before, after, tmp_path):
    checkpoint = saved(tmp_path, before)
    shares = [read_rank_state(checkpoint, "residual/w", rank, after) for rank in range(after)]
    if before == after:
        assert all(np.array_equal(share, residual(rank)) for rank, share in enumerate(shares))
    np.testing.assert_allclose(sum(shares), sum(residual(rank) for rank in range(before)), rtol=1e-14, atol=1e-14)
    assert read_rank_state(checkpoint, "residual/v", 0, after) is None


def test_shapes_that_differ_from_rank_to_rank_are_refused_elsewhere(tmp_path):
    SimWorld(2).run(
        lambda comm: save(comm, tmp_path, 1, rank_state_shards(comm.rank, {"r": np.zeros(comm.rank + 1)}), {})
    )
    with pytest.raises(UsageError, match=r"several shapes.*; resume on 2 ranks, as it was saved"):
        read_rank_state(Checkpoint(tmp_path), "r", 0, 3)
