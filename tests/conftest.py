"""Settings shared by all tests: hypothesis draws the same examples in every run, and `mpi` tests get their ranks."""

import gc
import os
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cases import sample

pytest_plugins = ["tests.mpi_runner", "tests.examples", "tests.command_line"]

# By processor time; of the first two by the clock, for they wait for timeouts.
LONGEST = (
    "comm/mpi/test_failures",
    "comm/mpi/test_watchdog",
    "test_mpi_examples",
    "lesson/test_lessons",
    "train/test_under_mpi",
    "train/test_servers",
    "lesson/test_cheats",
    "comm/mpi/test_start",
    "test_readme",
    "golden/test_golden",
    "train/test_folded_dry_run",
    "techniques/test_extensions",
    "config/test_no_setting_is_ignored",
    "commands/test_cli",
    "equality/test_layout_sweep",
    "techniques/test_repartition",
    "techniques/test_sharded_replicas",
    "techniques/test_memory_budget_file",
    "lesson/test_judge",
    "report/test_chakra",
    "test_mpi_runner",
    "test_wheel",
    "techniques/test_quantization",
    "train/test_memory_over_steps",
    "commands/test_memory_budget",
    "pipeline/test_plans",
    "pipeline/test_pipedream",
    "planning/test_ready_commands",
)

if "MINIDIST_MPI_TEST_DIRECTORY" not in os.environ:  # a rank draws nothing, and the import takes half a second
    from hypothesis import Phase, settings
    from hypothesis.internal.conjecture import providers

    # Else Hypothesis reads every source file that is loaded, and draws numbers that stand there: other examples in each
    # process and after each edit.
    providers._get_local_constants = lambda: providers._local_constants

    # The same examples everywhere, so that red is red for everybody; `--hypothesis-profile=explore` draws new ones.
    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
    settings.register_profile("exhaustive", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None, max_examples=1000)
    # A mutant's test need not say which example is the smallest that fails.
    unshrunk = (Phase.explicit, Phase.reuse, Phase.generate)
    settings.register_profile("mutants", settings.get_profile("ci"), phases=unshrunk)
    settings.load_profile("ci")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items):
        """Leave a sample of the tests that are marked `sampled(n)`; `make exhaustive` runs the others.

        Begin with the files that take longest, so that no worker is left with one of them at the end.
        """
        grids = defaultdict(list)
        for item in items:
            if (mark := item.get_closest_marker("sampled")) is not None:
                grids[item.nodeid.split("[")[0], mark.args[0]].append((item.nodeid, item))
        for (_, one_in), grid in grids.items():
            drawn = {name for name, _ in sample(grid, one_in)}
            for name, item in grid:
                if name not in drawn:
                    item.add_marker("exhaustive")

        place = {f"tests/{name}.py": number for number, name in enumerate(LONGEST)}
        files = {item: item.nodeid.split("::")[0] for item in items}
        items.sort(key=lambda item: (place.get(files[item], len(place)), files[item]))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(collector):
        """Let each worker begin with other folders: in a fresh clone it compiles a share of the files, not all."""
        report = yield
        worker = getattr(collector.config, "workerinput", None)
        if worker is not None and collector.path == Path(__file__).parent:
            number = int(worker["workerid"].removeprefix("gw"))
            begin = len(report.result) * number // worker["workercount"]
            report.result[:] = report.result[begin:] + report.result[:begin]
        return report


def pytest_collection():
    """Keep the cycle collector off: what is imported and collected is there to the end, 300,000 objects."""
    gc.disable()


def pytest_collection_finish():
    """Let the cycle collector pass over all that from here on, and look for garbage after 50,000 objects, not 700."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def no_algorithm_stays():
    """Take the collectives that a test registers out again: `bench collectives` runs all there are."""
    from minidist.collectives.algorithms import ALGORITHMS

    before = {
        operation: (len(entries), dict(entries), dict(entries.aliases)) for operation, entries in ALGORITHMS.items()
    }
    yield
    for operation, (count, entries, aliases) in before.items():
        there = ALGORITHMS[operation]
        if len(there) != count:
            for name in set(there) - set(entries):
                del there[name]
            there.aliases.clear()
            there.aliases.update(aliases)


# Wait for no disk: that a file outlives its process needs none, and a thousand checkpoints wait for a minute.
os.fsync = lambda descriptor: None

# A shell starts a background job with Ctrl-C ignored, and every program that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def progress_is_not_the_users(tmp_path_factory):
    """Keep tries and solved puzzles of tests out of the home folder of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        if "MINIDIST_MPI_TEST_DIRECTORY" not in os.environ:
            patch.setenv("MINIDIST_HOME", str(tmp_path_factory.mktemp("home")))
        yield
