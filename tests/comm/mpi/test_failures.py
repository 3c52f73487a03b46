"""Wrong programs under a real mpiexec: they end, soon, with a nonzero code, and say who and where.

Each test writes a program, starts it as a user would (`mpiexec -n 3 python program.py`) and reads what it printed.
"""

import json
import re
import socket
import subprocess
import sys

import pytest

from minidist.comm.launcher import is_open_mpi

TIMEOUT = "1"  # seconds until a wait is reported, in which its ranks take all cores; enough on a busy machine


def test_a_program_that_is_right(run, tmp_path):
    program = """
def main(comm):
    total = all_reduce(comm, one(comm.rank))
    if comm.rank == 0:
        print("total", total[0])
"""
    output = run(program, 3, "--trace", "trace.jsonl")
    assert "total 3.0" in output
    assert json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[0])["world"] == "mpi"
    assert not list(tmp_path.glob("minidist-*"))  # nothing is left of the watchdogs


def test_a_deadlock_names_every_rank_with_its_line(run):
    program = """
def main(comm):
    comm.recv(one(), (comm.rank + 1) % comm.size, tag=5)
"""
    output = run(program, 3, "--timeout", TIMEOUT, code=None)
    for rank in range(3):
        place = f"program.py:{run.line('comm.recv')}"
        assert re.search(
            rf"rank {rank}: waits in receive from rank {(rank + 1) % 3}, tag 5, 8 B, at \S*{place}", output
        ), output
    assert "circle: rank 0 -> rank 1 -> rank 2 -> rank 0" in output
    assert "hint:" not in output
    assert output.count("every rank's pending operation") == 1  # one report


def test_lines_of_ranks_do_not_get_into_each_other(run):
    """Python's print writes a line and its end separately, where it does not collect them."""
    program = """
def main(comm):
    comm.barrier()
    for i in range(300):
        print("rank", comm.rank, "line", i)
"""
    output = run(program, 3, environment={"PYTHONUNBUFFERED": "1"})
    lines = sorted(f"rank {rank} line {i}" for rank in range(3) for i in range(300))
    if is_open_mpi():  # it cuts lines itself, where a block of 4,096 B ends
        assert sorted(output) == sorted("\n".join([*lines, ""]))
    else:
        assert sorted(output.splitlines()) == lines


def test_every_line_is_one_write():
    """So that a launcher can pass lines on whole: a socket of packets shows the writes of a process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = """
from minidist.comm.mpi.execute import whole_lines
whole_lines()
for i in range(3):
    print("line", i, "x" * 3000)
"""
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-u", "-c", program], stdout=theirs)
        theirs.close()
        writes = list(iter(lambda: ours.recv(100_000), b""))
        assert process.wait(60) == 0
    assert writes == [f"line {i} {'x' * 3000}\n".encode() for i in range(3)]


SEND_FIRST = """
def main(comm):
    comm.send(np.zeros(4), (comm.rank + 1) % comm.size)
    comm.recv(np.zeros(4), (comm.rank - 1) % comm.size)
    print("through")
"""


def test_sending_first_is_through_when_buffered_and_deadlocks_when_synchronous(run):
    assert run(SEND_FIRST, 2).count("through") == 2
    output = run(SEND_FIRST, 2, "--synchronous", "--timeout", TIMEOUT, code=None)
    assert output.count(f"program.py:{run.line('comm.send')}") == 2, output
    assert "rank 0: waits in send to rank 1, tag 0, 32 B" in output
    assert "hint: every rank sends and none receives: let some ranks receive first" in output


def test_a_blocking_send_to_itself_names_the_remedy(run):
    output = run(
        "def main(comm):\n    comm.send(one(), comm.rank)\n    comm.recv(one(), comm.rank)\n",
        1,
        "--synchronous",
        "--timeout",
        TIMEOUT,
        code=None,
    )
    assert "hint: rank 0 sends to itself, and posts no receive before" in output
    assert "every rank sends" not in output


def test_a_wait_in_a_clean_up_names_the_error_that_led_there(run):
    program = """
def main(comm):
    try:
        if comm.rank == 1:
            raise ValueError("boom")
    finally:
        if comm.rank:
            comm.barrier()
"""
    output = run(program, 2, "--timeout", TIMEOUT, code=None)
    assert (
        f"rank 1: waits in barrier: receive from rank 0, tag 0, 0 B, at program.py:{run.line('comm.barrier')}" in output
    ), output
    assert f"while it handles ValueError: boom, raised at program.py:{run.line('raise')}" in output


def test_a_deadlock_in_a_stream_names_the_collective(run):
    program = """
def main(comm):
    if comm.rank == 0:
        work = all_reduce(comm, one(), async_op=True)
        work.wait()
    else:
        comm.recv(one(), 0)
"""
    output = run(program, 2, "--timeout", TIMEOUT, code=None)
    assert "rank 0: waits in all_reduce/ring, started at" in output, output
    assert f"program.py:{run.line('work.wait')}" in output
    assert "its stream waits in all_reduce/ring: " in output


def test_a_deadlock_without_checks_and_record_names_the_exchange(run):
    program = """
from functools import partial
launch = partial(launch, checks=False, record=False)
def main(comm):
    if comm.rank:
        all_reduce(comm, one())
"""
    output = run(program, 3, "--timeout", TIMEOUT, code=None)
    assert re.search(
        r"rank 1: waits in all_reduce/ring: sendrecv to rank 2 and from rank 0, tag 0, \d+ B, waited for at program.py",
        output,
    ), output
    assert f"program.py:{run.line('all_reduce(comm')}" in output


def test_a_rank_that_returned_is_named(run):
    program = """
def main(comm):
    if comm.rank == 1:
        comm.barrier()
"""
    output = run(program, 2, "--timeout", TIMEOUT, code=None)
    assert "rank 0: has returned" in output, output
    assert "hint: rank 0 has returned: it cannot complete what rank 1 waits for" in output
    assert (
        f"rank 1: waits in barrier: receive from rank 0, tag 0, 0 B, at program.py:{run.line('comm.barrier')}" in output
    )


def test_a_rank_that_computes_without_end_is_named_with_its_line(run):
    program = """
def main(comm):
    if comm.rank == 1:
        while True:
            pass
    comm.recv(one(), 1)
"""
    output = run(program, 2, "--timeout", TIMEOUT, code=None)
    assert re.search(rf"rank 1: computing at \S*program.py:({run.line('while')}|{run.line('pass')})", output), output


def test_a_result_that_cannot_be_sent_ends_the_job(run):
    """The others are in the gather of the results, and would wait for ever."""
    output = run("\ndef main(comm):\n    return (lambda: 1) if comm.rank == 1 else 1\n", 2, code=2)
    assert "rank 1: its result, a function, cannot be sent to rank 0 (" in output, output
    assert "Traceback" not in output


def test_a_rank_that_does_not_come_to_a_group_is_named(run):
    """Making a communicator blocks inside MPI."""
    program = """
def main(comm):
    if comm.rank == 0:
        comm.group([0, 1], "pair")
"""
    output = run(program, 2, "--timeout", TIMEOUT, code=None)
    assert "rank 0: waits in making the communicator world.1pair of ranks [0, 1]" in output, output
    assert f"program.py:{run.line('comm.group')}" in output


def test_an_operation_on_two_communicators_is_named_as_in_the_simulated_world(run):
    program = """
import numpy as np
from minidist.core.collectives import all_reduce

def main(comm):
    pair = comm.group([0, 1], "pair")
    all_reduce(comm if comm.rank == 0 else pair, np.zeros(2), algorithm="ring")
"""
    hint = (
        "hint: all_reduce/ring is called by rank 0 on world (ranks 0, 1), and by rank 1 on world.1pair (ranks 0, 1):"
        " all ranks of a communicator must call it there\n"
    )
    assert hint in run(program, 2, "--timeout", TIMEOUT, code=None)
    assert hint in run(program, 2, "--ranks", "2", code=None, launcher=False)


@pytest.mark.parametrize(
    ("sent", "expected", "what"),
    [
        ("np.zeros(4, np.float32)", "np.zeros(2, np.float64)", "dtype mismatch"),
        ("np.zeros(1 << 20)", "np.zeros(1 << 18)", "shape mismatch"),  # would be written behind the buffer's end
    ],
)
def test_a_mismatch_is_an_error_at_the_first_message_that_meets(run, sent, expected, what):
    program = f"""
def main(comm):
    if comm.rank == 0:
        comm.send({sent}, 1)
    else:
        comm.recv({expected}, 0)
"""
    output = run(program, 2, code=1)
    assert f"{what}: rank 0 sent" in output, output
    assert f"program.py:{run.line('comm.recv')}" in output


CHANGED = {
    "a send": ("comm.isend(array, 1 - comm.rank)", "the buffer of its send to rank .* was changed"),
    "what a stream sends": (
        "all_reduce(comm, array, async_op=True)",
        r"the buffer of its all_reduce/ring, started at \S* was changed .*, before \S*program.py:\d+; wait",
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_buffer_that_changes_in_flight(run, what):
    call, words = CHANGED[what]
    program = f"""
def main(comm):
    size = 4 if "isend" in {call!r} else 1 << 16  # a short send has left when it is posted
    array, got = np.ones(size), np.zeros(size)
    work = {call}
    array[:] = 7
    work.wait()
    if "isend" in {call!r}:
        comm.recv(got, 1 - comm.rank)
"""
    output = run(program, 2, code=1)
    assert re.search(rf"rank \d: {words}", output), output
    assert f"program.py:{run.line('work = ')}" in output
    assert output.count("wait() first") == 1, output  # both ranks have changed theirs, and one sentence is enough


WRITTEN = {
    "before the message has come": "array[0] = 7\n        comm.send(one(), 1)",
    "after another message has come": "comm.send(one(), 1)\n        comm.recv(one(), 1, tag=2)\n        array[0] = 7",
}


@pytest.mark.parametrize(("what", "elements"), list(zip(WRITTEN, (1 << 18, 4), strict=True)))
def test_a_write_into_the_buffer_of_a_posted_receive(run, what, elements):
    program = f"""
def main(comm):
    array = np.zeros({elements})
    if comm.rank == 0:
        work = comm.irecv(array, 1)
        {WRITTEN[what]}
        work.wait()
    else:
        comm.recv(one(), 0)
        work = comm.isend(array, 0)
        comm.send(one(), 0, tag=2)
        work.wait()
"""
    output = run(program, 2, "--timeout", "10", code=1)
    assert re.search(
        r"rank 0: the buffer of its receive from rank 1, tag 0, \d+ B, at \S*program.py:\d+ was", output
    ), output


def test_a_send_that_is_changed_and_changed_back(run):
    """The receiver has got what the buffer held meanwhile; the sender's own look at the wait finds nothing."""
    program = """
def main(comm):
    array = np.zeros(1 << 20)
    if comm.rank == 0:
        work = comm.isend(array, 1)  # 8 MB stay here until the receiver asks for them
        array[:] = 7
        comm.send(one(), 1, tag=1)
        comm.recv(one(), 1, tag=2)
        array[:] = 0
        work.wait()
    else:
        comm.recv(one(), 0, tag=1)
        comm.recv(array, 0)
        print("got", array.max())
        comm.send(one(), 0, tag=2)
"""
    output = run(program, 2, "--timeout", "10", code=1)
    assert "got other bytes than rank 0 posted: rank 0 changed the buffer" in output, output


def test_a_receive_into_memory_that_is_in_use(run):
    program = "\ndef main(comm):\n    array = np.ones(4)\n    [comm.irecv(array, 0), comm.irecv(array[1:], 0)]\n"
    output = run(program, 1, code=1)
    assert "give each message a separate buffer" in output, output


def test_unlike_roots_are_a_hint(run):
    """Both ranks wait for the other's part, and no two messages meet that could be compared."""
    program = """
from minidist.collectives import reduce
def main(comm):
    reduce(comm, one(), root=comm.rank)
"""
    output = run(program, 2, "--timeout", TIMEOUT, code=1)
    assert (
        "hint: roots differ: call 0 of world is reduce/naive root 0 on rank 0 and reduce/naive root 1 on rank 1, at"
        f" program.py:{run.line('reduce(comm')}; every rank must" in output
    ), output


def test_unlike_roots_of_a_short_broadcast_are_told_at_the_end(run):
    """Every rank sends and none receives. What a next message would say is in mismatches.py."""
    program = """
def main(comm):
    comm.barrier()
    if comm.rank:
        broadcast(comm, one(), root=1)
    else:
        broadcast(comm, one(), root=0)
"""
    output = run(program, 2, code=1)
    assert (
        "roots differ: call 1 of world is broadcast/naive root 0 on rank 0 at"
        f" program.py:{run.line('root=0')} and broadcast/naive root 1 on rank 1 at program.py:{run.line('root=1')};"
        " every rank must pass the same root" in output
    ), output
    assert output.count("roots differ") == 1
    assert "Traceback" not in output


def test_unlike_calls_are_told_also_without_a_watchdog(run):
    """Without one no rank can ask another for its calls: the message alone says that they differ."""
    program = """
def main(comm):
    broadcast(comm, one(), root=comm.rank)
    all_reduce(comm, one())
"""
    output = run(program, 2, "--timeout", "0", code=1)
    assert re.search(
        r"calls differ: rank \d and rank \d have made other collective calls on world before their all_reduce/ring at"
        rf" program.py:{run.line('all_reduce(')}; every rank",
        output,
    ), output


def test_a_call_that_one_rank_makes_more_often_is_told_at_the_end(run):
    program = """
def main(comm):
    for _ in range(2 + (comm.rank == 0)):
        broadcast(comm, one())
"""
    output = run(program, 3, code=1)
    assert (
        "calls differ: call 2 of world is broadcast of float64[1] on rank 0, at"
        f" program.py:{run.line('broadcast(comm')}, and ranks 1, 2 made no such call" in output
    ), output


def test_a_message_in_another_tag_is_a_hint(run):
    program = """
def main(comm):
    if comm.rank == 0:
        comm.isend(one(), 1, tag=3)
        comm.isend(one(), 1, tag=4)
        comm.isend(np.zeros(2), 1, tag=4)
        comm.recv(one(), 1)
    else:
        comm.recv(one(), 0, tag=4)
        comm.recv(one(), 0, tag=5)
"""
    output = run(program, 2, "--timeout", TIMEOUT, code=None)
    assert "hint: rank 1 waits for tag 5, but queued from rank 0 is tag 3 (8 B)" in output, output
    # The message that was not asked for.
    assert "hint: rank 1 waits for tag 5, but queued from rank 0 is tag 4 (16 B)" in output
    assert output.count("hint:") == 2


def test_museum_a_rank_that_skips_a_collective(run):
    """The sums go on, one step askew; the call numbers tell."""
    program = """
def main(comm):
    for step in range(3):
        if (comm.rank, step) != (1, 1):
            all_reduce(comm, one(step), algorithm="recursive_doubling")
    if comm.rank == 1:
        broadcast(comm, one(), root=1)
"""
    output = run(program, 2, code=1)
    words = r"operation mismatch: call 2 of world is all_reduce/recursive_doubling of .* on rank 0 at .* and broadcast"
    assert re.search(words, output), output


@pytest.mark.parametrize("where", ["main", "stream"])
def test_a_rank_that_raises_ends_the_job_under_plain_python(run, where):
    call = "wrong()" if where == "main" else "comm.collective('mine').run_async(wrong).wait()"
    program = f"""
def wrong():
    raise KeyError("lost")
def main(comm):
    print(f"printed before {{comm.rank}}\\n", end="")
    if comm.rank == 1:
        {call}
    comm.barrier()
"""
    output = run(program, 3, code=1)
    assert "minidist: rank 1 of 3 raised; the job ends." in output, output
    assert "KeyError: 'lost'" in output
    assert "printed before 1" in output  # not lost in a buffer
    assert ("raised in lane:world of rank 1" in output) == (where == "stream")


def test_sys_exit(run):
    run("\ndef main(comm):\n    comm.barrier()\n    sys.exit()\n", 2)
    run("\ndef main(comm):\n    if comm.rank:\n        sys.exit(3)\n    comm.barrier()\n", 2, code=3)


def test_a_killed_rank_leaves_its_trace(run, tmp_path):
    program = """
import signal
def main(comm):
    for i in range(3):
        comm.barrier()
    if comm.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
"""
    run(program, 2, "--timeout", "2", code=None)
    folder = next(tmp_path.glob("minidist-*"))
    messages = [json.loads(line) for line in (folder / "rank1.trace.jsonl").read_text().splitlines()]
    assert [m["operation"] for m in messages] == ["barrier"] * 6
    assert json.loads((folder / "rank1.json").read_text())["what"].startswith("computing at")


def test_world_kill_ends_the_job_as_mpi_has_it(run):
    output = run(
        "\ndef main(comm):\n    if comm.rank == 1:\n        comm.world.kill(1)\n    comm.barrier()\n", 2, code=1
    )
    assert "minidist: rank 1: killed, and under MPI the job ends with it" in output, output
    output = run("\ndef main(comm):\n    comm.world.kill(1 - comm.rank)\n", 2, code=2)
    assert "under MPI a rank can kill only itself" in output, output


def test_a_request_that_is_never_waited_for(run):
    what = "all_reduce(comm, one(), async_op=True)"
    output = run(f"\ndef main(comm):\n    {what}\n", 1, code=1)
    assert re.search(r"rank 0: its .* was never waited for", output), output
    assert f"program.py:{run.line(what)}" in output


def test_sys_exit_of_a_virtual_rank_says_which(run):
    output = run(
        "\ndef main(comm):\n    comm.barrier()\n    sys.exit(3 * comm.rank)\n",
        1,
        "--ranks",
        "2",
        launcher=False,
        code=3,
    )
    assert "minidist: SystemExit 3 raised on rank 1 of 2" in output, output


def test_a_launcher_of_another_library_is_refused(run):
    """Every process would be rank 0 of 1, and everything would pass."""
    output = run("\ndef main(comm):\n    pass\n", 1, launcher=False, environment={"MINIDIST_SIZE": "4"}, code=2)
    assert "the launcher started 4 processes but" in output, output
    assert "sees 1" in output


def test_virtual_ranks_under_mpiexec_are_refused(run):
    output = run("\ndef main(comm):\n    pass\n", 2, "--ranks", "4", code=2)
    assert "--ranks 4 under an mpiexec that started 2 processes" in output, output


def test_without_a_launcher_the_ranks_are_virtual(run):
    output = run("\ndef main(comm):\n    print(comm.world.kind, comm.rank)\n", 1, "--ranks", "2", launcher=False)
    assert output == "simulated 0\nsimulated 1\n"
    output = run("\ndef main(comm):\n    comm.recv(one(), comm.rank)\n", 1, "--ranks", "2", launcher=False, code=1)
    assert output.startswith("minidist: deadlock: 2 of 2 ranks are blocked"), output


def test_a_rank_that_is_stopped_when_its_program_is_over_is_reported(run):
    """The others wait in MPI_Finalize, and rank 0 may have printed the result already."""
    program = """
import atexit, signal
def main(comm):
    if comm.rank == 1:
        atexit.register(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    else:
        atexit.register(time.sleep, 1.5)  # longer than the timeout, and alive
"""
    output = run(program, 3, "--timeout", "0.8", timeout=20, code=None)
    said = [line for line in output.splitlines() if line.startswith("minidist:")]
    assert len(said) == 1, output
    assert re.match(
        r"minidist: rank 1 of 3 has given no sign of life for 0.8 s \(--timeout\) at the end of the job, and rank [02]"
        r" waits in MPI_Finalize; let a process that is stopped \(SIGSTOP",
        said[0],
    )


def test_a_rank_that_is_stopped_while_it_sends_its_result_is_reported(run):
    """Its program has returned without an error, and rank 0 waits for what it returned."""
    program = """
import signal
class Stopping:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGSTOP)
def main(comm):
    return Stopping() if comm.rank == 1 else None
"""
    output = run(program, 2, "--timeout", TIMEOUT, timeout=20, code=None)
    assert f"no progress on rank 0 for {TIMEOUT} s" in output
    assert "rank 0: has returned, and waits for the others to finish" in output
