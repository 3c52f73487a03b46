"""How well does the virtual clock predict a network? Three hosts on this machine with a rate limit between them.

On one machine messages go through shared memory, and the alpha-beta model cannot be observed. So this makes hosts:
network namespaces, each with an interface on one bridge and a token bucket that limits its rate:

    node0 eth0 ══ 200 Mbit/s ══╗
    node1 eth0 ══ 200 Mbit/s ══╬══ bridge        mpiexec starts one rank in each; MPI is told to use TCP only
    node2 eth0 ══ 200 Mbit/s ══╝

Measured time is compared with the virtual clock's (alpha: half of a measured round trip; beta: the rate, and the
headers that TCP, IP and Ethernet add to each frame), and the interface's own byte counter with the trace's bytes. The
clock models no contention: algorithms in which a rank sends to one other at a time are predicted within a few percent;
`ordered`, whose TCP streams compete for one bucket, takes 5 to 20 % longer than predicted. Needs root, `ip` and `tc`
(iproute2) and MPICH's mpiexec; everything that it makes is removed again.

Proved by: tests/bench/test_network.py
"""

import json
import os
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.read_file import parse_json
from minidist.collectives.auto import virtual_seconds
from minidist.comm.errors import LauncherError
from minidist.comm.launcher import find_mpiexec, launcher_version
from minidist.comm.mpi.world import MPIWorld
from minidist.comm.sim.links import LinkModel
from minidist.core import collectives
from minidist.core.base.errors import UsageError
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.report.bench.harness import call_of, mpi_world, slowest

SIZES = (1024 * 1024, 4 * 1024 * 1024)
ALGORITHMS = ("ring", "rabenseifner", "recursive_doubling")
FRAME, PAYLOAD = 1514, 1448  # bytes of a full Ethernet frame (1500 + 14), and of the data in it (20 IP, 32 TCP)
NETWORK = "198.18.7"  # of the range that RFC 2544 sets aside for benchmarks
COUNTER = "/sys/class/net/eth0/statistics/tx_bytes"
# TCP only, or shared memory would bypass the network; and both directions at once, which the default for large
# messages (a remote write) does not do over one connection.
UCX = ("-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_RNDV_SCHEME", "am")
AGENT = """#!/bin/sh
[ "$1" = -x ] && shift
host=$1; shift
exec ip netns exec "$host" sh -c "$*"
"""  # what mpiexec calls instead of ssh


def bench_network(
    hosts: int = 3,
    rate: float = 200e6,
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] = ALGORITHMS,
    rounds: int = 3,
) -> dict[str, Any]:
    """Return {environment, rows}: `ratio` is measured over predicted; `wire_bytes`, `trace_bytes` left the first host.

    rate: bits per second. Raises LauncherError with what is missing when this machine cannot have such hosts.
    """
    if not 2 <= hosts <= 200:
        raise UsageError(f"bench network --hosts {hosts}; it must be 2 to 200")
    for name in algorithms:
        # A wrong name is refused before anything starts.
        collectives.calls.ALGORITHMS["all_reduce"][name]
    if rounds < 1:
        raise UsageError(f"bench network --rounds {rounds}; a median takes at least 1 call")
    if any(size < 4 or size % 4 for size in sizes):
        raise UsageError(
            f"bench network --sizes {','.join(map(str, sizes))}; bytes of float32 arrays are multiples of 4, at least 4"
        )
    if not 1e6 <= rate <= 1e10:
        raise UsageError(f"bench network --rate {rate / 1e6:g}; it must be 1 to 10,000 Mbit/s")
    check_rights()

    # MPICH's launcher reaches a namespace as it would reach a host by ssh.
    with network(hosts, rate) as (names, agent):
        launcher = ["-launcher", "ssh", "-launcher-exec", str(agent), "-localhost", f"{NETWORK}.254"]
        ranks = ["-hosts", ",".join(names), *UCX, "-n", str(hosts)]
        program = [sys.executable, *call_of(main, list(algorithms), list(sizes), rounds)]
        command = [find_mpiexec(), *launcher, *ranks, *program]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if answer.returncode:
        raise LauncherError(
            f"mpiexec over {hosts} network namespaces ended with exit code {answer.returncode}: {answer.stderr[-2000:]}"
        )

    # The clock gets what was measured (alpha) and what was configured (beta), nothing that is fitted.
    measured = parse_json(answer.stdout, any_float=True)
    links = LinkModel(alpha=measured["alpha"], beta=8 / rate * FRAME / PAYLOAD)
    for row in measured["rows"]:
        row["predicted_s"] = virtual_seconds("all_reduce", row["algorithm"], hosts, row["bytes"], links)
        row["ratio"] = row["median_s"] / row["predicted_s"]
    environment = {
        "hosts": hosts,
        "rate Mbit/s": rate / 1e6,
        "alpha": links.alpha,
        "beta": links.beta,
        "mpi": launcher_version(find_mpiexec()),
    }
    return {"environment": environment, "rows": measured["rows"]}


def check_rights() -> None:
    """Raise LauncherError with what is missing: root, ip, tc, namespaces, or MPICH's launcher."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise LauncherError(f"bench network needs {program}, which is missing; install iproute2")

    # The right to make a namespace and the right to limit its rate are different ones, so both are tried.
    name = f"md{os.getpid()}x"
    for command in (
        ["ip", "netns", "add", name],
        ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf", *bucket(1e6)],
    ):
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            raise LauncherError(
                "bench network needs the right to make network namespaces and to limit their rate (root, in most"
                f" containers --privileged), and this process has not: `{' '.join(command[:4])}` said:"
                f" {answer.stderr.strip()}"
            )
    run("ip", "netns", "del", name)

    version = launcher_version(find_mpiexec())
    if not version.startswith("MPICH Hydra"):
        raise LauncherError(
            f"bench network needs MPICH's mpiexec, which can start ranks without ssh, and found {version}; pip install"
            " mpich"
        )


def bucket(rate: float) -> list[str]:
    """Return a token bucket that lets `rate` bits per second pass, and at most 16 KiB at once."""
    return ["rate", f"{rate:.0f}bit", "burst", "16kb", "latency", "400ms"]


@contextmanager
def network(hosts: int, rate: float) -> Iterator[tuple[list[str], Path]]:
    """Yield the names of `hosts` namespaces on one bridge, and the agent that starts a program in one."""
    tag = f"md{os.getpid()}"
    names, bridge = [f"{tag}-{i}" for i in range(hosts)], f"{tag}br"[-15:]
    with tempfile.TemporaryDirectory(prefix="minidist-") as folder:
        # mpiexec calls the agent with the arguments of ssh.
        agent = Path(folder) / "agent"
        agent.write_text(AGENT)
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        try:
            # The bridge is the switch, and has an address for mpiexec itself.
            run("ip", "link", "add", bridge, "type", "bridge")
            run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", bridge)
            run("ip", "link", "set", bridge, "up")

            # Each host has one interface, plugged into the bridge, whose outgoing rate is limited.
            for i, name in enumerate(names):
                run("ip", "netns", "add", name)
                run("ip", "link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
                run("ip", "link", "set", f"{tag}v{i}", "master", bridge, "up")
                run("ip", "-n", name, "link", "set", "lo", "up")
                run("ip", "-n", name, "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", "eth0")
                run("ip", "-n", name, "link", "set", "eth0", "up")
                run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket(rate))
            yield names, agent
        finally:
            # Also after an error: namespaces and bridges outlive the process.
            for name in names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def run(*command: str) -> None:
    """Run a program that configures the network; LauncherError with its message when it fails."""
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise LauncherError(f"bench network: `{' '.join(command)}` said: {answer.stderr.strip()}")


def latency(comm: Comm, rounds: int = 30) -> float:
    """Return half of the median round trip of 8 bytes between ranks 0 and 1; 0 on the others."""
    ball, seconds = np.zeros(1), []
    if comm.rank > 1:
        return 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        if comm.rank == 0:
            comm.send(ball, 1)
            comm.recv(ball, 1)
        else:
            comm.recv(ball, 0)
            comm.send(ball, 0)
        seconds.append(time.perf_counter() - began)
    # One way is half of a round trip.
    return statistics.median(seconds) / 2


def sent_by_interface() -> int:
    """Return the bytes that left this host's interface since it was made, with frames and acknowledgements."""
    return int(Path(COUNTER).read_text())


def measure(world: MPIWorld, algorithm: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Return one row: the median over rounds of the slowest rank's time; bytes of the last round on this rank."""
    comm, array = world.comm, np.ones(nbytes // 4, np.float32)
    seconds = []
    # The first round opens the connections.
    for _ in range(rounds + 1):
        array[:] = 1
        world.base.Barrier()
        # Both counters before and after the call, so that only its own bytes are compared.
        wire, trace = sent_by_interface(), sum(message.nbytes for message in world.trace.sent())
        began = time.perf_counter()
        all_reduce(comm, array, algorithm=algorithm)
        seconds.append(slowest(world, time.perf_counter() - began))
        wire, trace = sent_by_interface() - wire, sum(message.nbytes for message in world.trace.sent()) - trace
        if not (array == comm.size).all():
            raise LauncherError(f"rank {comm.rank}: {algorithm} over the network gave {array[:3]}, not {comm.size}")
    return {
        "name": f"{algorithm}, {nbytes // 1024} KiB",
        "median_s": statistics.median(seconds[1:]),
        "rounds": rounds,
        "algorithm": algorithm,
        "bytes": nbytes,
        "wire_bytes": wire,
        "trace_bytes": trace,
    }


def table(result: dict[str, Any]) -> str:
    """Format the rows: measured and predicted times, the interface's and the trace's bytes."""
    lines = [
        f"{'all-reduce':34s}{'measured ms':>12s}{'predicted ms':>13s}{'ratio':>7s}"
        f"{'interface bytes':>17s}{'trace bytes':>13s}"
    ]
    lines += [
        f"{row['name']:34s}{1e3 * row['median_s']:12.1f}{1e3 * row['predicted_s']:13.1f}{row['ratio']:7.2f}"
        f"{row['wire_bytes']:17,d}{row['trace_bytes']:13,d}"
        for row in result["rows"]
    ]
    lines.append(
        "bytes: of one call, out of the first host; the interface counts headers and acknowledgements, the trace what"
        " was asked for"
    )
    return "\n".join(lines)


def main(algorithms: list[str], sizes: list[int], rounds: int) -> None:
    """Run one rank of the benchmark, in its network namespace; rank 0 prints the result as JSON."""
    with mpi_world(timeout=120, record=True) as world:
        alpha = latency(world.comm)
        rows = [measure(world, algorithm, nbytes, rounds) for nbytes in sizes for algorithm in algorithms]
        if world.rank == 0:
            print(json.dumps({"alpha": alpha, "rows": rows}))
