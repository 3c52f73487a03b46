"""Settings shared by all tests: hypothesis draws the same examples in every run, and `mpi` tests get their ranks."""

import gc
import os
import signal
from collections import Counter
from zlib import crc32

import pytest

pytest_plugins = ["tests.mpi_runner", "tests.examples"]

# By processor time; of the first two by the clock, for they wait for timeouts.
LONGEST = (
    "comm/mpi/test_failures",
    "comm/mpi/test_watchdog",
    "lesson/test_lessons",
    "test_mpi_examples",
    "test_readme",
    "train/test_under_mpi",
    "equality/test_layout_sweep",
    "comm/mpi/test_start",
    "lesson/test_judge",
    "golden/test_golden",
    "commands/test_cli",
    "lesson/test_cheats",
    "parallel/test_tensor",
    "parallel/test_fully_shard",
    "parallel/test_mixed_precision",
    "test_wheel",
    "test_mpi_runner",
    "pipeline/test_runtime",
    "pipeline/test_plans",
    "museum/test_museum",
    "parallel/test_zero",
    "config/test_no_setting_is_ignored",
    "train/test_precision",
    "train/test_memory_over_steps",
    "techniques/test_repartition",
    "equality/test_rounding",
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

    def pytest_collection_modifyitems(items):
        """Begin with the files that take longest, so that no worker is left with one of them at the end."""
        place = {f"tests/{name}.py": number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))


_cases: Counter[str] = Counter()  # of each test that is collected


def pytest_itemcollected(item):
    """Leave of a test that is marked `sampled(n)` the first case and about one in n; `make exhaustive` runs the others.

    A checksum of the name draws them, so that they are the same everywhere.
    """
    mark = item.get_closest_marker("sampled")
    if mark is not None:
        test = item.nodeid.split("[")[0]
        _cases[test] += 1
        if _cases[test] > 1 and crc32(item.nodeid.encode()) % mark.args[0]:
            item.add_marker("exhaustive")


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
