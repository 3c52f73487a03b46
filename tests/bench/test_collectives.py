"""The benchmarks of collectives: what they print is what was measured, on the virtual clock to the digit."""

import json
import sys
from itertools import pairwise

import numpy as np
import pytest

from minidist.collectives import bus_factor, tuning
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.closed_forms import seconds
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import UsageError
from minidist.report.bench import collectives as real
from minidist.report.bench import virtual_collectives as virtual
from minidist.report.crossover import crossover
from tests.cases import each


def test_bus_bandwidth_is_that_of_nccl_tests():
    """Its table: allreduce 2 (n-1)/n; reduce-scatter, all-gather, all-to-all (n-1)/n; broadcast, reduce 1."""
    factors = {name: bus_factor(name, 4) for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")}
    assert factors == {"all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75}
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1.0


def test_rows_of_measured_times():
    """Ratios round by round, the best of ours by its median; never an opponent of itself."""
    times = {
        "ring": [4e-3, 4e-3, 6e-3],
        "naive": [5e-3, 5e-3, 5e-3],
        "auto": [1e-3] * 3,
        "MPI_Allreduce": [2e-3, 4e-3, 2e-3],
    }
    rows = {row["side"]: row for row in real.rows(times, 8_000_000, 4, 3, chosen="naive")}
    assert set(rows) == {"best of ours", "ring", "naive", "auto"}
    assert (rows["ring"]["ratio"], rows["best of ours"]["algorithm"], rows["best of ours"]["ratio"]) == (
        2.0,
        "ring",
        2.0,
    )
    assert (rows["ring"]["algbw"], rows["ring"]["busbw"]) == (2.0, 3.0)
    text = real.table({"rows": list(rows.values())})
    assert "* ring" in text
    assert "/ MPI_Allreduce" in text
    assert "gloo" not in text
    assert (rows["auto"]["algorithm"], rows["auto"]["to_best"], rows["naive"]["to_best"]) == ("naive", 0.25, 1.25)
    assert "auto / best of ours: at most 0.25, at 8,000,000 B" in text
    assert "the algorithms have been measured anew" in text  # naive takes 1.25 times as long as the ring
    assert "anew" not in real.table({"rows": real.rows(times, 8_000_000, 4, 3, chosen="ring")})


def test_the_best_algorithm_is_chosen_by_other_rounds():
    """Of equally fast algorithms none is slower than the best one, however noisy the rounds are."""
    generator, found = np.random.default_rng(0), []
    for _ in range(300):
        names = [f"algorithm {i}" for i in range(8)]
        times = {name: generator.lognormal(0.0, 1.0, 8).tolist() for name in (*names, "auto", "MPI_Allreduce")}
        row = next(row for row in real.rows(times, 64, 2, 8, chosen=names[0]) if row["side"] == "auto")
        found.append((row["to_best"], row["choice_to_best"]))
    # The least median of eight is less than half of the others'.
    assert np.median(found, axis=0) == pytest.approx([1.0, 1.0], abs=0.15)
    # A single round chooses by itself.
    assert real.best_by_other_rounds({"ring": [2.0], "naive": [1.0]}, ["ring", "naive"]) == [1.0]


@pytest.mark.mpi(2)
def test_every_side_is_measured_and_compared(comm, monkeypatch, tmp_path):
    from minidist.comm.mpi.world import MPIWorld
    from minidist.core.base.errors import MinidistError

    monkeypatch.setenv("MINIDIST_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "BUDGET", 1e-9)
    world = MPIWorld(checks=False, record=False, timeout=0)
    sides = real.sides_of(world, with_torch=False)  # torch takes seconds to import
    assert set(sides) == {*ALGORITHMS["all_reduce"], "auto", "MPI_Allreduce", "mpi4py"}
    # Results are compared first. MPI buffers a message of 64 B; a longer one is copied before it is sent.
    for nbytes in (64, 16 * 1024):
        times = real.measure(world, sides, nbytes, rounds=2)
        assert {name: len(seconds) for name, seconds in times.items()} == dict.fromkeys(sides, 2)
    with pytest.raises(MinidistError, match=r"wrong of 64 B gave .*, not 3; no ratio is given"):
        real.measure(world, {"wrong": lambda array: None}, 64, 2)
    world.finish()
    world.close()


@pytest.mark.parametrize("operation", ["all_reduce", "all_to_all"])
def test_the_virtual_table_is_the_clock(operation):
    links = LinkModel(alpha=2.0**-10, beta=2.0**-20)
    result = virtual.bench_virtual_collectives(operation, 8, links, [64, 2**20])
    for row in result["rows"]:
        assert row["median_s"] == seconds(operation, row["algorithm"], row["bytes"], 8, links.alpha, links.beta)
        assert row["busbw"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9 * bus_factor(operation, 8))
        assert row["side"] != "auto" or row["ratio"] <= 1.05
    assert {row["side"] for row in result["rows"]} == {*ALGORITHMS[operation], "auto"}
    for nbytes in (64, 2**20):
        assert min(row["ratio"] for row in result["rows"] if row["bytes"] == nbytes) == 1.0
    assert "1,048,576" in virtual.table(result)


def test_the_crossover_picture_has_a_line_for_each_algorithm_and_names_what_auto_chose():
    rows = virtual.bench_virtual_collectives("all_reduce", 8, sizes=[2**k for k in range(0, 27, 3)])["rows"]
    axes = crossover(rows, command="minidist bench collectives --simulated").axes[0]
    labels = [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    assert labels
    assert not any("$" in label for label in labels)
    lines = {line.get_gid(): line for line in axes.lines if line.get_gid()}
    assert set(lines) == {*ALGORITHMS["all_reduce"], "auto"}
    best = [min(row["median_s"] for row in rows if row["bytes"] == 2**k) * 1e6 for k in range(0, 27, 3)]
    assert list(lines["auto"].get_ydata()) == pytest.approx(best)
    taken = [row["algorithm"] for row in rows if row["side"] == "auto"]
    changes = [a for a, b in pairwise(taken) if a != b]
    assert len(changes) >= 2
    assert [text.get_text() for text in axes.texts] == [*changes, taken[-1]]
    assert len([line for line in axes.lines if not line.get_gid()]) == len(changes)


def test_the_command(tmp_path, minidist):
    picture = tmp_path / "crossover.svg"
    words = ["--simulated", "--ranks", "4", "--sizes", "8,4096", "--picture", picture, "--json"]
    result = json.loads(minidist("bench", "collectives", *words).out)
    assert result["environment"]["ranks"] == 4
    assert {row["bytes"] for row in result["rows"]} == {8, 4096}
    assert "recursive_doubling" in picture.read_text()


def test_an_algorithm_of_a_file_is_timed_beside_the_others(tmp_path, minidist, monkeypatch):
    """One that looks at elements runs on real arrays; its time is that of its messages."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom minidist.collectives import algorithm; from minidist.core.collectives import ring\n"
        "@algorithm('all_reduce', 'looking')\n"
        "def f(comm, array, op):\n    assert np.asarray(array).sum() >= 0\n"
        "    return ring.all_reduce(comm, array, op)\n"
    )
    monkeypatch.setattr(sys, "argv", ["minidist"])
    before = dict(ALGORITHMS["all_reduce"])
    try:
        words = ["bench", "collectives", "--simulated", "--ranks", "4", "--sizes", "64,4096", "--json"]
        rows = {
            (row["side"], row["bytes"]): row["median_s"]
            for row in json.loads(minidist(*words, "--algorithm", f"{tmp_path / 'mine.py'}:f").out)["rows"]
        }
        assert rows["looking", 4096] == rows["ring", 4096] > rows["looking", 64] == rows["ring", 64]
        with pytest.raises(UsageError, match="all_reduce/looking does not run on arrays without elements"):
            virtual.bench_virtual_collectives(ranks=4, sizes=[2**28])
    finally:
        ALGORITHMS["all_reduce"].clear()
        ALGORITHMS["all_reduce"].update(before)


@each(
    ("call", "words"),
    [
        (lambda: virtual.bench_virtual_collectives("allreduce"), "did you mean 'all_reduce'"),
        (lambda: virtual.bench_virtual_collectives(ranks=0), "--ranks 0; a simulated world has 1 to 4,096 ranks"),
        (lambda: real.bench_collectives(1), "at least 2 processes"),
        (lambda: virtual.bench_virtual_collectives(sizes=[8, -1]), r"--sizes \[8, -1\]; an array has 0 to"),
        (
            lambda: virtual.bench_virtual_collectives(links=LinkModel(alpha=float("nan"))),
            "alpha is nan; it must be 0, or a number from",
        ),
        (
            lambda: virtual.bench_virtual_collectives(links=LinkModel(beta=float("inf"))),
            "beta is inf; it must be 0, or a number from",
        ),
        (lambda: real.bench_collectives(2, 0), "--rounds 0; a median takes at least 1"),
        (lambda: real.bench_collectives(2, 8, [6]), "multiples of 4"),
    ],
)
def test_wrong_input(call, words):
    with pytest.raises(UsageError, match=words):
        call()
