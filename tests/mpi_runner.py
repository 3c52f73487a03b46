"""Runs tests marked `@pytest.mark.mpi(n)` in n MPI ranks, so that a real MPI run is as cheap to write as any test.

The pytest that a person starts (the *parent*) never imports mpi4py. It starts one `mpiexec` for each n, whose ranks
stay: for each module, a pytest in each rank runs all selected tests of that module with that n, in the same order,
with a barrier between. Python, NumPy and minidist are imported once, which takes longer than most tests.

    parent                                rank 0, rank 1, ...
    writes tests.json, its folder   --->  a pytest on the same module, which selects these tests
    reads rank-*.jsonl              <---  {"start": id}, {"report": ...}, {"done": id}

A test passes when it passes on every rank. After a failure the other ranks may sit in a receive that no rank will ever
send to, so they get a short grace and then are killed, and new ones are started with the next test. A test that exceeds
its timeout fails with the stacks of all ranks. Nothing here can hang: ranks that wait for tests wait in a pipe of the
parent, and end when that does.
"""

import faulthandler
import functools
import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest

DIRECTORY = "MINIDIST_MPI_TEST_DIRECTORY"  # set in a rank, and only there: the folder of the tests that it runs
RANKS = "MINIDIST_MPI_TEST_RANKS"
MOST_KEPT = 4  # ranks that stay for the next module; more would take memory for little
DEFAULT_TIMEOUT = 60.0  # seconds of one test, see the marker
STARTUP_TIMEOUT = 60.0  # seconds until the first test begins
GRACE = 2.0  # seconds for the other ranks to end a test that failed on one


def pytest_configure(config):
    if DIRECTORY in os.environ:
        config.pluginmanager.register(Rank(config), "minidist-mpi-rank")
    else:
        config.pluginmanager.register(Parent(config), "minidist-mpi-parent")


@pytest.fixture
def comm(request):
    """A communicator over all ranks of an `mpi` test, of a separate world.

    After a test that passed the world is finished, so a request that was never waited for, or a message that was never
    received, fails the test. After a failure that question would wait for ranks that no longer answer.
    """
    if DIRECTORY not in os.environ:
        pytest.fail("the fixture `comm` is one rank's communicator: mark the test with @pytest.mark.mpi(n)")
    from minidist.comm.mpi.ending import leave
    from minidist.comm.mpi.world import MPIWorld

    world = MPIWorld()
    yield world.comm
    if not request.config.pluginmanager.get_plugin("minidist-mpi-rank").failed:
        world.finish()
        world.close()
        leave()  # these processes are killed in the end


# ---------------------------------------------------------------------------------------------------- in each rank


@functools.cache
def between_tests():
    """Our communicator: its barrier must not meet a message of a test."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


def serve():
    """Be one rank: run a pytest for each line of the pipe of this rank, (its folder, its arguments), to the end."""
    gc.disable()  # until the first tests begin: nothing that is imported is garbage
    rank, size = between_tests().rank, between_tests().size
    if size != int(os.environ[RANKS]):
        from mpi4py import MPI

        sys.exit(
            f"asked for {os.environ[RANKS]} ranks, but MPI says that this is rank {rank} of {size}: "
            f"{mpiexec()} does not belong to the library of mpi4py, {MPI.Get_library_version().split(',')[0]}"
        )
    sys.path[0] = os.getcwd()  # not the folder of this file; as in `python -m pytest`
    with open(Path(os.environ[DIRECTORY]) / f"pipe-{rank}") as pipe:
        for line in pipe:
            os.environ[DIRECTORY], *arguments = json.loads(line)
            code = pytest.main(arguments)
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                sys.exit(code)


class Rank:
    """What a rank's pytest does besides running the tests: keep step with the others and write down what happened."""

    def __init__(self, config):
        self.config = config
        self.directory = Path(os.environ[DIRECTORY])
        self.between_tests = between_tests()
        rank = self.between_tests.rank
        config.option.basetemp = self.directory / f"tmp-{rank}"  # tmp_path, without a race between the ranks
        self.events = open(self.directory / f"rank-{rank}.jsonl", "w", buffering=1)  # noqa: SIM115, lives as long as we
        self.stack = open(self.directory / f"stack-{rank}.txt", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=self.stack, all_threads=True)
        self.failed = False
        self.write(pid=os.getpid())

    def write(self, **event):
        self.events.write(json.dumps(event) + "\n")

    def pytest_collection_modifyitems(self, items):
        wanted = json.loads((self.directory / "tests.json").read_text())
        found = {item.nodeid: item for item in items}
        items[:] = [found[nodeid] for nodeid in wanted]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.between_tests.Barrier()
        self.write(start=item.nodeid)
        result = yield
        self.write(done=item.nodeid)
        if self.failed:
            time.sleep(STARTUP_TIMEOUT)  # the parent kills us long before
            os.abort()
        return result

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or report.failed
        self.write(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_sessionfinish(self):
        self.write(end=True)


# ------------------------------------------------------------------------------------------------------- the parent


def mpiexec():
    """The launcher next to this Python (a wheel puts it there), else the first one on PATH, else None."""
    return shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")


@functools.cache
def is_open_mpi():
    """Whether mpiexec is Open MPI's, which refuses more ranks than cores, and root, unless told."""
    version = subprocess.run([mpiexec(), "--version"], capture_output=True, text=True, check=False).stdout
    return "Open MPI" in version or "OpenRTE" in version


class Parent:
    """Takes the marked tests away from the ordinary pytest and reports what the ranks said of them."""

    def __init__(self, config):
        self.config = config
        self.results = {}  # node id -> reports
        self.launches = {}  # number of ranks -> Launch, of those that stay

    def pytest_collection_modifyitems(self, items):
        missing = "mpi4py" if importlib.util.find_spec("mpi4py") is None else "mpiexec" if mpiexec() is None else None
        for item in items:
            if item.get_closest_marker("mpi") is None:
                continue
            if getattr(item.obj, "is_hypothesis_test", False):
                raise pytest.UsageError(f"{item.nodeid}: hypothesis would draw apart on the ranks; parametrize instead")
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"{missing} is not installed: pip install 'minidist[mpi]'"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        done = yield
        if nextitem is None:  # the last test of all
            for launch in list(self.launches.values()):
                self.finish(launch)
        return done

    @pytest.hookimpl(tryfirst=True, specname="pytest_runtest_protocol")
    def pytest_run_in_ranks(self, item, nextitem):
        """Report what the ranks say of a marked test; the first one of a module and n lets them run all of those."""
        if item.get_closest_marker("mpi") is None or item.get_closest_marker("skip") is not None:
            return None
        if item.nodeid not in self.results:
            key = (item.path, ranks_of(item))
            marked = [other for other in item.session.items if other.get_closest_marker("mpi") is not None]
            self.run_group([o for o in marked if (o.path, ranks_of(o)) == key], ranks_of(item))
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.results[item.nodeid]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # the module of an ordinary test before us may end here
        return True

    def run_group(self, items, ranks):
        """Take the reports of all `items`, of one module. Starts new ranks after each test that failed."""
        rest = items
        while rest:
            if ranks not in self.launches:
                self.launches[ranks] = Launch(self.config, ranks)
            launch = self.launches[ranks]
            launch.begin(rest)
            for item in rest:
                trouble = launch.follow(item)
                self.results[item.nodeid] = merge(item, launch.reports[item.nodeid], trouble)
                rest = rest[1:]
                if trouble or launch.failed(item):
                    self.launches.pop(ranks).kill()
                    break
        if ranks > MOST_KEPT and ranks in self.launches:
            self.finish(self.launches[ranks])

    def finish(self, launch):
        """Let ranks end; ranks that do not end are a failure of the last of their tests."""
        trouble = launch.finish()
        self.launches.pop(launch.ranks).kill()
        if trouble:
            report = failure(launch.items[-1], trouble, when="teardown")
            launch.items[-1].ihook.pytest_runtest_logreport(report=report)

    def pytest_unconfigure(self):
        for launch in self.launches.values():
            launch.kill()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def shared_memory_of(pid):
    """The files in /dev/shm that a process has mapped: MPI's, when it has just been initialised (Linux; else none)."""
    try:
        return set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    except OSError:
        return set()


def ranks_of(item):
    return item.get_closest_marker("mpi").args[0]


def merge(item, by_rank, trouble):
    """One test's reports from those of its ranks: rank 0's where all agree, else a failure that says who did what."""
    failures = defaultdict(list)
    for rank, reports in sorted(by_rank.items()):
        for report in reports:
            if report.failed:
                sections = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
                failures[report.longreprtext + sections].append(rank)
    outcomes = {rank: [report.outcome for report in reports] for rank, reports in sorted(by_rank.items())}
    if not failures and not trouble:
        if len({tuple(outcome) for outcome in outcomes.values()}) == 1:
            return by_rank[0]
        trouble = f"the ranks disagree: {outcomes}"
    parts = [f"==== on rank {', '.join(map(str, ranks))} ====\n{text}" for text, ranks in failures.items()]
    seconds = max((sum(report.duration for report in reports) for reports in by_rank.values()), default=0.0)
    return [failure(item, "\n".join([*parts, trouble] if trouble else parts), seconds=seconds)]


def failure(item, text, when="call", seconds=0.0):
    """The report of a test that failed."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=text,
        when=when,
        duration=seconds,
    )


class Launch:
    """One `mpiexec`, and what its ranks have written so far about the tests that they run."""

    def __init__(self, config, ranks):
        self.config, self.ranks = config, ranks
        self.folder = Path(tempfile.mkdtemp(prefix="minidist-mpi-"))
        self.groups = 0
        self.pids = {}
        self.shared_memory = set()  # files
        self.files = {}

        # Read and write: opening it does not wait for the other side.
        for rank in range(ranks):
            os.mkfifo(self.folder / f"pipe-{rank}")
        self.pipes = [os.open(self.folder / f"pipe-{rank}", os.O_RDWR) for rank in range(ranks)]

        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        environment |= {DIRECTORY: str(self.folder), RANKS: str(ranks), "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing hypothesis would take most of the time
        options = []
        if is_open_mpi():
            options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.output = open(self.folder / "output.txt", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [mpiexec(), *options, "-n", str(ranks), sys.executable, __file__],
            env=environment,
            cwd=config.invocation_params.dir,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def begin(self, items):
        """Let the ranks run these tests, of one module."""
        self.items = items
        self.reports = defaultdict(lambda: defaultdict(list))  # node id -> rank -> reports
        self.done = defaultdict(set)  # node id -> ranks
        self.started = set()  # node ids
        self.ended = set()  # ranks
        self.close_files()
        self.groups += 1
        self.directory = self.folder / str(self.groups)
        self.directory.mkdir()
        (self.directory / "tests.json").write_text(json.dumps([item.nodeid for item in items]))
        # The parent has selected: the ranks run these tests although the settings leave their mark out (-m).
        options = ["-p", "no:cacheprovider", "-m", "", "--rootdir", self.config.rootpath]
        if self.config.inipath:
            options += ["-c", self.config.inipath]
        line = json.dumps([str(word) for word in (self.directory, *options, items[0].path)]) + "\n"
        for pipe in self.pipes:
            os.write(pipe, line.encode())

    def read(self):
        """Take in the complete lines that the ranks have added."""
        for rank in range(self.ranks):
            path = self.directory / f"rank-{rank}.jsonl"
            if rank not in self.files:
                if not path.exists():
                    continue
                self.files[rank] = open(path, "rb")  # noqa: SIM115
            while line := self.files[rank].readline():
                if not line.endswith(b"\n"):  # still being written: read it whole next time
                    self.files[rank].seek(-len(line), os.SEEK_CUR)
                    break
                match json.loads(line):
                    case {"pid": pid}:
                        self.pids[rank] = pid
                        self.shared_memory |= shared_memory_of(pid)
                    case {"start": nodeid}:
                        self.started.add(nodeid)
                    case {"report": data}:
                        report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
                        if isinstance(report.longrepr, list):  # (file, line, reason) of a skip, through JSON
                            report.longrepr = tuple(report.longrepr)
                        self.reports[report.nodeid][rank].append(report)
                    case {"done": nodeid}:
                        self.done[nodeid].add(rank)
                    case {"end": _}:
                        self.ended.add(rank)

    def failed(self, item):
        return any(report.failed for reports in self.reports[item.nodeid].values() for report in reports)

    def follow(self, item):
        """Wait until every rank has ended the test. Returns "", or why that will not happen."""
        timeout = item.get_closest_marker("mpi").kwargs.get("timeout", DEFAULT_TIMEOUT)
        deadline, begun, grace = time.monotonic() + STARTUP_TIMEOUT, False, None
        while True:
            over = self.process.poll() is not None  # asked first: what was written before the end is read below
            self.read()
            now = time.monotonic()
            if len(self.done[item.nodeid]) == self.ranks:
                return ""
            missing = sorted(set(range(self.ranks)) - self.done[item.nodeid])
            if over or self.ended & set(missing):
                return f"==== rank {missing} ended without a result ====\n{self.tail()}"
            if not begun and item.nodeid in self.started:
                deadline, begun = now + timeout, True
            if grace is None and self.failed(item):
                grace = now + GRACE
            if grace is not None and now > grace:
                return f"==== rank {missing} still in the test {GRACE:g} s after that failure ====\n{self.stacks()}"
            if now > deadline:
                if not begun:
                    return f"==== not started after {STARTUP_TIMEOUT:g} s ====\n{self.stacks()}\n{self.tail()}"
                return f"==== timeout: rank {missing} still in the test after {timeout:g} s ====\n{self.stacks()}"
            time.sleep(0.01)

    def finish(self):
        """Wait for the processes to end after the last test. Returns "", or the stacks of those that do not."""
        self.close_pipes()
        try:
            self.process.wait(STARTUP_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"==== all tests ended but the ranks did not: is a message left over? ====\n{self.stacks()}"
        return ""

    def stacks(self):
        """The Python stack of every rank, without pytest's own frames."""
        for pid in filter(alive, self.pids.values()):
            os.kill(pid, signal.SIGUSR2)
        time.sleep(0.5)
        parts = []
        for rank in range(self.ranks):
            path = self.directory / f"stack-{rank}.txt"
            lines = path.read_text().splitlines() if path.exists() else ["(did not start)"]
            hidden = ("/_pytest/", "/pluggy/", "/pytest/", "<frozen runpy>")
            parts.append("\n".join([f"rank {rank}:", *(x for x in lines if not any(name in x for name in hidden))]))
        return "\n".join(parts)

    def tail(self):
        self.output.seek(0)
        return "\n".join(self.output.read().splitlines()[-40:])

    def kill(self):
        """End every process of this launch: the ranks by their own ids, since launchers put them in other groups.

        A killed rank leaves MPI's shared memory behind as a file, megabytes a launch, so that is unlinked here.
        """
        if self.process.poll() is None:
            for pid in filter(alive, self.pids.values()):
                os.kill(pid, signal.SIGKILL)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for name in self.shared_memory:
            Path(name).unlink(missing_ok=True)
        self.close_pipes()
        self.close_files()
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close_pipes(self):
        while self.pipes:
            os.close(self.pipes.pop())

    def close_files(self):
        while self.files:
            self.files.popitem()[1].close()


if __name__ == "__main__":
    serve()
