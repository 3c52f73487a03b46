"""Whole programs: what a rank has for itself, MPI's objects, what is refused, and the command."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minidist.base.trace_file import read_traces
from minidist.base.user_file import ProgramError
from minidist.core.base.errors import MinidistError, UsageError
from minidist.debug.mpi_ranks.program import run_on_ranks
from tests.mpi_ranks.on_ranks import on_ranks, program
from tests.mpi_runner import mpiexec

ROOT = Path(__file__).parents[2]
COURSE = Path(__file__).with_name("cse234.py")
EXAMPLE = ROOT / "mpi_examples" / "1_messages" / "heat.py"


def test_every_rank_has_modules_of_its_own(tmp_path):
    (tmp_path / "shared.py").write_text("count = 0\n")
    run = run_on_ranks(
        program(
            tmp_path,
            "import sys, mpi4py, shared\nmpi4py.rc(threads=False)\nfrom mpi4py import MPI\n"
            "shared.count += 1 + MPI.COMM_WORLD.rank\nMPI.COMM_WORLD.Barrier()\n"
            "print(shared.count, __name__, MPI.COMM_SELF.size, MPI.COMM_SELF.rank)\n",
        ),
        3,
    )
    assert run.outputs == [f"{rank + 1} __main__ 1 0\n" for rank in range(3)]
    assert "shared" not in sys.modules


def test_groups_and_communicators():
    def main(comm, MPI):
        r, n = comm.rank, comm.size
        halves = comm.Split(r % 2 if r else MPI.UNDEFINED, key=-r)
        assert halves == MPI.COMM_NULL if r == 0 else halves.allgather(r) == ([3, 1] if r % 2 else [4, 2])
        group = comm.group.Excl([0])
        assert (group.size, group.rank) == (n - 1, r - 1 if r else MPI.UNDEFINED)
        rest = comm.Create(group)
        if r:
            assert rest.Get_group().Translate_ranks([0], comm.group) == [1]
            again = rest.Create_group(rest.group.Incl([1, 0])) if r < 3 else MPI.COMM_NULL
            assert again == MPI.COMM_NULL or again.rank == 2 - r
            assert rest.Compare(rest.Dup()) == MPI.CONGRUENT
            rest.Free()
        assert rest == MPI.COMM_NULL
        with pytest.raises(MPI.Exception, match="COMM_NULL") as error:
            rest.Get_size()
        assert error.value.error_class == MPI.ERR_COMM
        other = comm.Dup()
        comm.isend("world", (r + 1) % n)
        other.isend("copy", (r + 1) % n)
        assert (other.recv(), comm.recv()) == ("copy", "world")  # their messages never meet
        assert MPI.Group.Union(group, comm.group).size == n
        assert MPI.Group.Difference(comm.group, group).Translate_ranks([0], comm.group) == [0]
        assert comm.group.Range_incl([(4, 0, -2)]).Translate_ranks(None, comm.group) == [4, 2, 0]

    on_ranks(5, main)


def test_objects_of_mpi():
    def main(comm, MPI):
        for handle in (comm, MPI.INT, MPI.SUM, MPI.COMM_NULL):
            assert pickle.loads(pickle.dumps(handle)) is handle
        assert MPI.Comm(comm) == comm != MPI.COMM_SELF
        assert MPI.Comm.fromint(comm.toint()) == comm
        assert comm.Get_attr(MPI.TAG_UB) >= 2**15
        status = MPI.Status()
        status.Set_elements(MPI.DOUBLE, 3)
        assert (status.Get_count(MPI.INT), status.Get_count(MPI.LONG_DOUBLE)) == (6, MPI.UNDEFINED)
        assert pickle.loads(pickle.dumps(status)) == status
        info = MPI.Info.Create({"a": "1"})
        info["b"] = "2"
        assert (dict(info.items()), info.Get("c")) == ({"a": "1", "b": "2"}, None)
        assert MPI.Is_initialized()
        assert not MPI.Is_finalized()
        start = MPI.Wtime()
        assert 0 <= MPI.Wtime() - start < 60
        assert str(MPI.Exception(MPI.ERR_TAG)) == "MPI_ERR_TAG"

    on_ranks(1, main)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_refused_and_what_fails_is_said_in_one_sentence(tmp_path):
    begin = "import threading\nimport numpy as np\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
    for text, kind, found in (
        ("MPI.Win.Allocate(8)", UsageError, r"^MPI.Win.Allocate is not simulated.*, at \S*program.py:5$"),
        ("MPI.File.Open(comm, 'x')", UsageError, r"^MPI.File.Open is not simulated"),
        ("comm.Create_intercomm(0, comm, 1)", UsageError, r"^an intercommunicator .* is not simulated"),
        (
            "def work():\n    comm.bcast(1, 0)\nt = threading.Thread(target=work)\nt.start()\nt.join()\n1 / 0",
            UsageError,
            r"^rank 0: MPI is called in a thread that the program has started, at \S*program.py:6",
        ),
        ("comm.Psend_init", UsageError, r"^MPI.Intracomm.Psend_init is not simulated .*, at \S*program.py:5$"),
        ("not hasattr(MPI, 'Pack') and MPI.Grequest.Start()", UsageError, r"^MPI.Grequest.Start is not simulated"),
        ("comm.missing", ProgramError, "MPI.Intracomm has no attribute 'missing'"),
        ("from mpi4py.futures import MPIPoolExecutor", UsageError, r"^mpi4py.futures.MPIPoolExecutor is not simulated"),
        ("comm.Abort(3)", MinidistError, r"^rank 0 called Abort\(3\) at \S*program.py:5"),
        ("comm.send(1, 9)", ProgramError, r"MPI_ERR_RANK: rank 0: send names rank 9; ranks are 0..1"),
        ("1 / 0", ProgramError, r"(?s)ZeroDivisionError.*program.py.*raised on rank 0"),
        ("nothing(", UsageError, "line 5"),
    ):
        with pytest.raises(kind, match=found) as error:
            run_on_ranks(program(tmp_path, begin + text), 2)
        assert "mpi_ranks" not in str(error.value)
        assert kind is ProgramError or "\n" not in str(error.value)


def test_wildcards_show_whether_the_order_matters(tmp_path, minidist):
    text = (
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
        "if comm.rank:\n    comm.send(comm.rank, 0)\n"
        "else:\n    got = [comm.recv(source=MPI.ANY_SOURCE) for _ in range(3)]\n    print({})\n"
    )
    same, other = program(tmp_path, text.format("sum(got)")), program(tmp_path, text.format("got"), "other.py")
    every = ["mpi", "-n", 4, "--every-order"]
    out = minidist(*every, same.source).out
    assert out.splitlines()[-1] == "all 6 choices of the receives from any rank print the same"
    one = program(tmp_path, text.replace("(3)", "(1)"), "one.py")
    out = minidist("mpi", "-n", 2, "--every-order", one.source).out
    assert out.splitlines()[-1] == "no receive from any rank has a choice between messages"
    fails = program(tmp_path, text.format("1 / (got[0] - 2)"), "fails.py")
    out = minidist(*every, fails.source, code=1).out
    assert "the program fails: the program raised ZeroDivisionError" in out
    for flags in (["--every-order"], ["--interleavings", 9]):
        out = minidist("mpi", "-n", 4, *flags, other.source, code=1).out
        assert re.search(r"rank 0 prints '\[\d, \d, \d\]' in line 1, and '\[1, 2, 3\]' in the first run", out)
    deadlock = program(tmp_path, text.format("got[0] == 1 or comm.recv(source=1, tag=8)"), "third.py")
    assert "the program fails: deadlock" in minidist(*every, deadlock.source, code=1).out


def test_the_command(tmp_path, minidist, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "run.py").write_text("import sys\nfrom mpi4py import MPI\nprint(sys.argv[1:])\n")
    out, err = minidist("mpi", "-n", 2, "-m", "part.run", "--ranks", 3)
    assert out.count("['--ranks', '3']") == 2
    assert "--ranks stands after the script" in err
    program(tmp_path, "from mpi4py import MPI\nMPI.COMM_WORLD.isend(b'1', 0)\n", "lost.py")
    out, err = minidist("mpi", "-n", 1, "--eager-bytes", 99, "--trace", "t.jsonl", "--json", "lost.py", code=1)
    value = json.loads(out)
    assert value["sent"] == [{"communicator": "world", "operation": "send", "messages": 1, "bytes": 16}]
    assert "never received" in value["never_received"][0]
    assert (tmp_path / "t.jsonl").exists()
    assert "written" in err
    program(tmp_path, "from mpi4py import MPI\nc = MPI.COMM_WORLD\nc.send(1, c.rank ^ 1)\nc.recv()\n", "dead.py")
    err = minidist("mpi", "-n", 2, "--trace", "dead.jsonl", "dead.py", code=1).err
    assert "circle: rank 0 -> rank 1 -> rank 0" in err
    assert [len(trace.messages) for trace in read_traces("dead.jsonl")[0]] == [1, 1]
    for wrong in (["none.py"], ["--every-order", "--interleavings", 1, "dead.py"], ["-n", 0, "dead.py"]):
        assert minidist("mpi", *wrong, code=2).err.count("\n") == 1
    Path("dead.py").write_text("# to see it: minidist run dead.py\n" + Path("dead.py").read_text())
    assert "deadlock: 2 of 2 ranks" in minidist("run", "dead.py", "--ranks", 2, code=1).err


def test_a_program_that_uses_no_mpi_is_said_to_run_alone(tmp_path, minidist):
    (tmp_path / "alone.py").write_text("x = 1\n")
    (tmp_path / "hello.py").write_text("from mpi4py import MPI\n\nMPI.COMM_WORLD.Get_rank()\n")
    said = "does not name mpi4py: each of 2 ranks has run it alone, and none has sent anything\n"
    for name, words in (("alone.py", said), ("hello.py", "")):
        err = minidist("mpi", "--ranks", 2, tmp_path / name).err
        assert err.endswith(words)
        assert bool(err) == bool(words)


def test_the_pages_of_the_command_say_what_it_prints(tmp_path, minidist, monkeypatch):
    page = (ROOT / "docs" / "mpi.md").read_text()
    (text,) = re.findall(r"<!-- ring.py -->\n```python\n(.*?)```", page, flags=re.S)
    program(tmp_path, text, "ring.py")
    blocks = re.findall(r"```console\n\$ minidist mpi (.*?)```", page, flags=re.S)
    for block, folder, code in zip(blocks, (ROOT, tmp_path), (0, 1), strict=True):
        command, *shown = block.splitlines()
        monkeypatch.chdir(folder)
        out, err = minidist("mpi", *command.split(), code=code)
        assert (out + err).splitlines() == shown


@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec")
def test_the_example_prints_the_same_under_mpiexec(minidist):
    out = minidist("mpi", "--ranks", 2, EXAMPLE).out
    real = subprocess.run([mpiexec(), "-n", "2", sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60)
    assert real.stdout == out.splitlines(keepends=True)[0]
    assert "2 ranks: heat" in real.stdout
    assert np.isfinite(float(out.split()[3].rstrip(",")))


@pytest.mark.parametrize("ranks", [4, 8])
def test_what_a_course_demands_of_its_assignments_is_met_on_simulated_ranks(minidist, ranks):
    assert minidist("mpi", "--ranks", ranks, COURSE).out.splitlines()[:1] == [f"{ranks} ranks passed"]


@pytest.mark.skipif(mpiexec() is None, reason="needs mpi4py and an mpiexec")
def test_what_a_course_demands_of_its_assignments_is_met_on_processes():
    real = subprocess.run([mpiexec(), "-n", "4", sys.executable, COURSE], capture_output=True, text=True, timeout=60)
    assert (real.stdout, real.returncode) == ("4 ranks passed\n", 0), real.stderr
