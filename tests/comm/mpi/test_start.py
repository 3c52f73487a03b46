"""The start of the ranks: nobody waits for ever for one that does not come, and what is wrong is said once."""

import re

import pytest

from minidist.comm.errors import LauncherError
from minidist.comm.launched import check_family, launched_rank, launched_size
from tests.cases import each
from tests.comm.mpi.conftest import UNRECEIVED

BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}


@each(
    ("environment", "size", "rank"),
    [
        ({}, None, 0),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, 4, 1),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, 3, 2),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, 8, 5),  # srun --mpi=pmix
        # An mpiexec inside a Slurm job.
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMI_RANK": "1", "PMI_SIZE": "8"}, 8, 1),
        # A batch script, and a shell that srun started, are one process.
        (BATCH, None, 0),
        ({**BATCH, "SLURM_STEP_NUM_TASKS": "1"}, None, 0),
        ({"PMI_SIZE": "many"}, None, 0),
    ],
)
def test_the_launcher_s_variables(environment, size, rank):
    assert (launched_size(environment), launched_rank(environment)) == (size, rank)


MPICH, OPEN_MPI = "MPICH Version:      5.0.2\nMPICH Release date: today", "Open MPI v5.0.11, package: Open MPI"
BY_OPEN_MPI, BY_HYDRA = {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "2", "HYDI_CONTROL_FD": "5"}


def test_a_launcher_of_another_mpi_is_named_before_mpi_starts():
    check_family(OPEN_MPI, BY_OPEN_MPI)
    check_family(MPICH, BY_HYDRA)
    check_family(MPICH, {**BY_OPEN_MPI, **BY_HYDRA})  # one inside the other
    check_family(MPICH, {**BY_OPEN_MPI, "MPI4PY_CHECK_MPIEXEC": "0"})
    check_family(OPEN_MPI, {"PMI_SIZE": "2"})  # srun --mpi=pmi2
    with pytest.raises(
        LauncherError, match=r"Open MPI's mpiexec started 2 processes, .* is MPICH Version: 5.0.2: .* use /"
    ):
        check_family(MPICH, BY_OPEN_MPI)
    with pytest.raises(LauncherError, match=r"MPICH's mpiexec started 2 processes, but .* is Open MPI v5.0.11"):
        check_family(OPEN_MPI, BY_HYDRA)


def test_a_launcher_of_another_mpi_is_one_sentence(run):
    for rank in range(2):
        environment = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank), "PMIX_RANK": str(rank)}
        output = run("\ndef main(comm):\n    pass\n", 1, launcher=False, environment=environment, code=2)
        assert output.count("minidist:") == (rank == 0), output
        assert "Traceback" not in output
        assert ("different MPI installations" in output) == (rank == 0)


ONLY_RANK_1 = """
from minidist.comm.launched import launched_rank
wrong = launched_rank() == 1
"""


def test_wrong_input_is_said_once(run):
    output = run("\ndef main(comm):\n    pass\n", 2, "--timeout", "-1", code=2)
    assert output.count("minidist: --timeout -1") == 1, output


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--bogus"], "No such option: --bogus"),
        (["train", "--steps", "0"], "steps"),
        (["report", "nothing.jsonl"], "there is no trace 'nothing.jsonl'"),
    ],
)
def test_a_wrong_command_line_is_said_once(run, arguments, words):
    output = run("", 2, last=f"from minidist.commands.app import main\nmain({arguments})", code=2)
    assert output.count(words) == 1, output


def test_wrong_input_on_one_rank_ends_all(run):
    output = run(
        ONLY_RANK_1 + "def main(comm):\n    print('ran')\n",
        3,
        last="launch(main, argv=['--timeout', '-1'] if wrong else [])",
        timeout=30,
        code=2,
    )
    assert output.count("minidist: --timeout -1") == 1, output
    assert "ran" not in output


def test_each_rank_s_own_wrong_input_is_said(run):
    output = run(
        ONLY_RANK_1 + "def main(comm):\n    pass\n",
        3,
        last="launch(main, argv=['--timeout', '-2' if wrong else '-1'])",
        code=2,
    )
    assert (output.count("--timeout -1;"), output.count("--timeout -2;")) == (1, 1), output


def test_what_all_ranks_find_in_the_run_is_said_once(run):
    output = run("\ndef main(comm):\n    comm.send(one(), 7)\n", 3, code=2)
    assert output.count("send names rank 7") == 1, output
    output = run("\ndef main(comm):\n    raise KeyError('lost')\n", 3, code=1)
    assert output.count("KeyError: 'lost'") == 1, output


NEVER_STARTS = {
    "it is stopped": "os.kill(os.getpid(), 19)",
    "it raises": "raise KeyError('early')",
    "it is killed": "os.kill(os.getpid(), 9)",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", NEVER_STARTS)
def test_a_rank_that_never_starts_leaves_nobody_waiting(run, how):
    output = run(
        ONLY_RANK_1 + f"if wrong:\n    {NEVER_STARTS[how]}\ndef main(comm):\n    pass\n",
        2,
        environment={"MINIDIST_START_TIMEOUT": "1"},
        timeout=60,
        code=None,
    )
    if how == "it is stopped" or not (how == "it is killed" or run.open_mpi):  # else the launcher may be first
        assert "rank 0 of 2: not all ranks have started within 1 s, and this one waits in MPI_Init" in output, output


@pytest.mark.parametrize("signal", ["SIGSTOP", "SIGINT"])
def test_a_rank_that_is_lost_while_the_world_is_made_leaves_nobody_waiting(run, signal):
    """After MPI_Init, where the others are in the first message of all."""
    output = run(
        ONLY_RANK_1
        + f"""
import signal
from minidist.comm.mpi import world
def lost(*arguments):
    os.kill(os.getpid(), signal.{signal})
    time.sleep(30)
if wrong:
    world.meet = lost
def main(comm):
    pass
""",
        2,
        environment={"MINIDIST_START_TIMEOUT": "3"},
        timeout=60,
        code=None,
    )
    if signal == "SIGSTOP":
        assert "this one waits in the first message of all ranks" in output, output
    if signal == "SIGINT":
        assert "minidist: rank 1 of 2: interrupted in the start of MPI" in output, output
        assert "Traceback" not in output


BROKEN = {"before MPI has started": "world.InterruptWatch = broken", "after it": "world.remove_old_folders = broken"}


@pytest.mark.parametrize("when", BROKEN)
def test_an_error_while_the_world_is_made_ends_the_job(run, when):
    output = run(
        ONLY_RANK_1
        + f"""
from minidist.comm.mpi import world
def broken(*arguments):
    return 1 / 0
if launched_rank() == 0:
    {BROKEN[when]}
def main(comm):
    pass
""",
        2,
        timeout=60,
        code=1,
    )
    assert re.search(r"minidist: (rank 0 of 2: )?the world cannot be made\n", output), output
    assert output.count("ZeroDivisionError") == 1


def test_a_limit_that_is_no_number_is_wrong_input(run):
    output = run("\ndef main(comm):\n    pass\n", 2, environment={"MINIDIST_START_TIMEOUT": "soon"}, code=2)
    assert output.count("MINIDIST_START_TIMEOUT='soon'; it must be a number of seconds") == 1, output


def test_two_runs_in_one_program(run):
    output = run("\ndef main(comm):\n    comm.barrier()\n", 2, last="launch(main)\nlaunch(main)\nprint('through')")
    assert output.count("through") == 2, output


# --- a communicator outside its run -----------------------------------------------------------------------------------


def test_a_communicator_that_is_used_after_its_run(run):
    calls = {
        "comm.send(one(), 0)": "world is used after its run has ended",
        "comm.barrier()": "world is used after its run has ended",
        "comm.dup()": "world.1dup is used after its run has ended",
    }
    attempts = [
        f"try:\n    {call}\nexcept UsageError as error:\n    print({call!r}, 'is refused:', error)" for call in calls
    ]
    output = run(
        "\ndef main(comm):\n    return comm\n",
        2,
        last="""
from minidist.core.base.errors import UsageError
from minidist.comm.mpi.world import MPIWorld
world = MPIWorld()
comm = world.run(main)[0]
world.close()
"""
        + "\n".join(attempts),
    )
    for call, words in calls.items():
        refused = [line for line in output.splitlines() if f"{call} is refused: " in line]
        assert len(refused) == 2, output
        assert all(words in line and f"program.py:{run.line(call)}" in line for line in refused), output


def test_a_backward_pass_in_a_second_thread(run):
    """Its reductions are works of a stream, which the rank's thread runs."""
    program = """
import threading
import numpy as np
from minidist import MLP, DistributedDataParallel, Tensor, cross_entropy
def main(comm):
    model, found = DistributedDataParallel(MLP([4, 3]), comm), []
    def other():
        try:
            cross_entropy(model(Tensor(np.ones((2, 4), np.float32))), np.zeros(2, int)).backward()
        except Exception as error:
            found.append(str(error))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    print(comm.rank, found)
"""
    output = run(program, 2)
    assert "rank 1: world is used in a second thread, at program.py:" in output, output


def test_an_error_whose_text_cannot_be_made(run):
    program = """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError
def main(comm):
    if comm.rank:
        raise Odd
    comm.barrier()
"""
    output = run(program, 2, code=1)
    assert "minidist: rank 1 of 2 raised; the job ends." in output, output


def test_no_rank_leaves_while_another_has_something_to_report(run):
    """The last barrier: rank 1 has a message left over, and rank 0, which has none, does not go on."""
    output = run(
        UNRECEIVED,
        2,
        last="""
from minidist.comm.mpi.world import MPIWorld
from minidist.comm.errors import UnmatchedMessageError
world = MPIWorld()
try:
    world.run(main)
    print(f"rank {world.rank} goes on", flush=True)
except UnmatchedMessageError as error:
    time.sleep(1)
    world.end(str(error), 1)
""",
        code=1,
    )
    assert "rank 1: received 0 of the 1 messages that rank 0 sent" in output
    assert "goes on" not in output
