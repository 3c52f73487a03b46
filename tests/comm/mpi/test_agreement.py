"""Ranks that were started with different settings: one sentence that names the setting, the ranks and the values."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minidist.comm import SimWorld
from minidist.comm.launcher import mpiexec_command
from minidist.comm.mpi import execute
from minidist.comm.mpi.agreement import check_same_settings, difference
from minidist.comm.mpi.execute import end_job, packed
from minidist.commands import runner
from minidist.commands.runner import settings_to_agree_on
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig

JOB = ["-m", "minidist", "train", "--model", "mlp", "--width", "8", "--steps", "2", "--dp", "2"]


def started(tmp_path, first, second):
    """The end of a job of two processes with a command line each."""
    pytest.importorskip("mpi4py")
    command, environment = mpiexec_command(1, [*first, "--trace", str(tmp_path / "t.jsonl")])
    # mpiexec's own syntax for several programs.
    words = [*command, ":", "-n", "1", sys.executable, *second, "--trace", str(tmp_path / "t.jsonl")]
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3]
    )


@pytest.mark.parametrize(
    ("one", "other", "sentence"),
    [
        (["--lr", "1e-3"], ["--lr", "1e-1"], "--lr is 0.001 on rank 0, 0.1 on rank 1; start every rank with the same"),
        (["--zero", "1"], ["--zero", "2", "--seed", "3"], "--seed is 0 on rank 0, 3 on rank 1 (and --zero)"),
    ],
    ids=["lr", "zero"],
)
def test_two_settings_under_mpiexec(one, other, sentence, tmp_path):
    done = started(tmp_path, [*JOB, *one], [*JOB, *other])
    assert done.returncode == 2, done.stderr
    assert f"the ranks were started with different settings: {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_content_under_the_same_name(tmp_path, monkeypatch):
    """Two hosts, each with a separate file: the content must be equal, the path need not."""
    monkeypatch.setattr(runner, "under_mpiexec", lambda: True)
    settings = []
    for name, text in (("a", b"x" * 400), ("b", b"x" * 400), ("c", b"x" * 399 + b"y")):
        (tmp_path / name).write_bytes(text)
        settings.append(settings_to_agree_on("train", TrainConfig.make(data=f"text:{tmp_path}/{name}")))
    assert settings[0] == settings[1]
    assert "different settings: the content of --data is" in difference([settings[0], settings[2]])
    compared = settings_to_agree_on("compare", TrainConfig.make(data=f"text:{tmp_path}/a"))
    assert "the command is train on rank 0, compare on rank 1;" in difference([settings[0], compared])


def test_the_sentence_groups_ranks_by_value():
    settings = [{"--lr": "1", "--clip": "None"}] * 12
    settings[3] = settings[5] = {"--lr": "2", "--clip": "1"}
    assert difference(settings) == (
        "the ranks were started with different settings: --lr is 1 on ranks 0, 1, 2, 4, 6, 7, 8, 9, ..., 2 on ranks 3,"
        " 5 (and --clip); start every rank with the same command line and files"
    )
    assert "--b is absent on rank 0, 7 on rank 1;" in difference([{"--a": "1"}, {"--a": "1", "--b": "7"}])
    assert len(difference([{"--data": "x" * 10**6}, {"--data": "y" * 10**6}])) < 500


@pytest.mark.mpi(3)
def test_every_rank_hears_of_a_difference(comm):
    check_same_settings(comm, {"--lr": 1.0})
    with pytest.raises(UsageError, match="--lr is 1 on ranks 0, 1, 3 on rank 2; start"):
        check_same_settings(comm, {"--lr": 3 if comm.rank == 2 else 1})
    check_same_settings(comm, {})


@pytest.mark.parametrize(
    "error",
    [
        lambda rank: UsageError(difference([{"--lr": "0.1"}, {"--lr": "0.2"}, {"--lr": "0.1"}])),
        lambda rank: _error_of(packed, SimpleNamespace(rank=rank, trace=None), lambda: rank),
    ],
    ids=["different settings", "a result that cannot be sent"],
)
def test_a_sentence_that_names_ranks_is_printed_once_for_all_ranks(error):
    said = []
    for rank in range(3):
        world = SimpleNamespace(rank=rank, size=3, end=lambda text, code, key: said.append((text, code, key)))
        end_job(world, error(rank))
    assert len({key for *_, key in said}) == 1
    assert [text.split(":")[1] for text, *_ in said] == [f" rank {rank}" for rank in range(3)]


class Failed(Exception):
    """What mpi4py raises: MPICH's lines, of which the last one says what failed. kind: MPI's class of the error."""

    def __init__(self, kind):
        super().__init__("Other MPI error, error stack:\nMPI_Test failed\ncopy_iovs(224): process_vm_readv failed")
        self.kind = kind

    def Get_error_class(self):
        return self.kind


@pytest.mark.parametrize(
    ("kind", "place", "sentence"),
    [
        (15, execute.__file__, True),
        (15, "program.py", False),  # of a program that calls MPI itself
        (14, execute.__file__, False),  # a message that is too long
    ],
)
def test_a_rank_that_finds_another_one_gone_says_it_in_one_sentence(kind, place, sentence):
    said = []
    mpi = SimpleNamespace(Exception=Failed, ERR_OTHER=15, ERR_INTERN=16, ERR_UNKNOWN=13)
    world = SimpleNamespace(rank=1, size=2, MPI=mpi, end=lambda text, code, key: said.append((text, code)))
    try:
        exec(compile("def call():\n    raise error\ncall()", place, "exec"), {"error": Failed(kind)})
    except Failed as error:
        end_job(world, error)
    ((text, code),) = said
    assert code == 1
    assert ("Traceback" in text) == (not sentence)
    expected = (
        "rank 1 of 2: MPI cannot go on (copy_iovs(224): process_vm_readv failed), as where the process of another"
    )
    assert (expected in text) == sentence


def _error_of(function, *arguments):
    with pytest.raises(UsageError) as caught:
        function(*arguments)
    return caught.value


def test_simulated_ranks_have_one_set_of_settings():
    world = SimWorld(2)
    world.run(lambda comm: check_same_settings(comm, {"--lr": 1}))
    assert not any(trace.messages for trace in world.traces)
