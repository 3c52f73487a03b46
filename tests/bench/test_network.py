"""Three hosts in network namespaces: the interface counts the trace's bytes; or one sentence why not.

How near the measured time is to the clock's is for `minidist bench network` on a quiet machine.
"""

import os
import shutil
import subprocess

import pytest

from minidist.collectives.closed_forms import seconds, volume
from minidist.comm.errors import LauncherError
from minidist.core.base.errors import UsageError
from minidist.report.bench import network


@pytest.fixture
def rights():
    try:
        network.check_rights()
    except LauncherError as error:
        pytest.skip(str(error))


def test_the_interface_counts_the_bytes_of_the_trace_and_the_time_is_compared_with_the_clock(rights):
    nbytes = 3 * 2**16
    result = network.bench_network(hosts=3, rate=10e6, sizes=[nbytes], algorithms=["ring"], rounds=1)
    (row,), clock = result["rows"], result["environment"]
    assert row["ratio"] == pytest.approx(row["median_s"] / row["predicted_s"])
    assert row["trace_bytes"] == 4 * volume("all_reduce", "ring", nbytes // 4, 3, 0).elements
    assert row["trace_bytes"] * network.FRAME / network.PAYLOAD <= 1.01 * row["wire_bytes"] <= 1.15 * row["trace_bytes"]
    assert clock["beta"] == pytest.approx(8 / 10e6 * network.FRAME / network.PAYLOAD)
    assert row["predicted_s"] == pytest.approx(seconds("all_reduce", "ring", nbytes, 3, clock["alpha"], clock["beta"]))
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"md{os.getpid()}" not in left  # all is taken away again


def test_without_the_tools_or_the_rights_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    with pytest.raises(LauncherError, match="bench network needs tc, which is missing; install iproute2"):
        network.bench_network()
    monkeypatch.setattr(shutil, "which", lambda program: f"/sbin/{program}")

    def refuse(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "mkdir /run/netns failed: Permission denied\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(
        LauncherError,
        match=r"(?s)needs the right to make network namespaces .*`ip netns add md\d+x` said: .*Permission denied$",
    ):
        network.bench_network()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hosts": 1}, "--hosts 1; it must be 2 to 200"),
        ({"rate": 1.0}, "1 to 10,000 Mbit/s"),
        ({"algorithms": ["rnig"]}, "did you mean 'ring'"),
        ({"rounds": 0}, "--rounds 0; a median takes at least 1"),
        ({"sizes": [1048576, 6]}, "--sizes 1048576,6; .* multiples of 4"),
    ],
)
def test_wrong_input(options, words):
    with pytest.raises(UsageError, match=words):
        network.bench_network(**options)
