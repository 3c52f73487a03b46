"""`minidist bench`: ratios measured in one interleaved run.

Proved by: tests/bench/test_collectives.py, tests/bench/test_environment.py, tests/bench/test_step.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.commands.command import Argument, Group, Option, Result, command_line, json_or_table, say
from minidist.commands.flags import above_zero, picture_file, whole_numbers, within_limits

bench = Group("Measure ratios in one interleaved run.")
Rounds = Annotated[int, Option(min=1, help="interleaved rounds")]
Cases = Annotated[list[str] | None, Argument(help="gpt, gpt-512, gpt-tiny, mlp; default all")]


BenchRanks = Annotated[int | None, Option(help="processes (default 2); virtual ranks with --simulated (default 16)")]
Overhead = Annotated[
    float,
    Option(
        help="with --simulated: seconds of the latency in which a port is busy with a message", callback=within_limits
    ),
]
CrossoverPicture = Annotated[
    Path | None,
    Option(help="draw time over bytes, with the crossovers, into this .svg, .pdf or .png", callback=picture_file),
]


@bench.command("collectives")
@json_or_table
def bench_collectives(
    ranks: BenchRanks = None,
    rounds: Annotated[int, Option(help="interleaved rounds")] = 8,
    sizes: Annotated[str | None, Option(help="bytes of the arrays, such as 4096,1048576")] = None,
    simulated: Annotated[
        bool, Option("--simulated", help="on the virtual clock: every algorithm, and what auto takes")
    ] = False,
    operation: Annotated[str, Option(help="with --simulated: the collective")] = "all_reduce",
    alpha: Annotated[
        float, Option(help="with --simulated: seconds of latency per message", callback=within_limits)
    ] = 1e-6,
    beta: Annotated[float, Option(help="with --simulated: seconds per byte", callback=within_limits)] = 1e-10,
    overhead: Overhead = 0.0,
    algorithm: Annotated[
        list[str] | None, Option(help="also an algorithm of your own: FILE.py:FUNCTION; may be repeated")
    ] = None,
    picture: CrossoverPicture = None,
) -> Result:
    """Time every all-reduce against MPI_Allreduce (and gloo, where torch is installed), or on the virtual clock."""
    # Imported here: `minidist --help` must not load every benchmark.
    from minidist.collectives import load_algorithm
    from minidist.comm.sim.links import LinkModel
    from minidist.report.bench import collectives, virtual_collectives

    lengths = tuple(whole_numbers(sizes, "--sizes")) if sizes else None
    for source in algorithm or ():
        load_algorithm(source, operation if simulated else "all_reduce")
    if simulated:
        ranks = 16 if ranks is None else ranks
        links = LinkModel(alpha, beta, overhead=overhead)
        result = virtual_collectives.bench_virtual_collectives(
            operation, ranks, links, lengths or virtual_collectives.SIZES
        )
    else:
        ranks = 2 if ranks is None else ranks
        result = _measured(collectives.bench_collectives, ranks, rounds, lengths or collectives.SIZES, algorithm or ())

    # Only rows of one side have a curve; those of the simulated world are messages per second.
    if picture:
        from minidist.report.crossover import crossover
        from minidist.report.frame import save

        title = f"{operation} on {ranks} {'virtual ranks' if simulated else 'processes'}"
        rows = [row for row in result["rows"] if "side" in row]
        say(f"written: {save(crossover(rows, title=title, command=command_line()), picture)}")

    def show() -> None:
        if simulated:
            print(virtual_collectives.table(result))
            return
        _show({**result, "rows": [row for row in result["rows"] if "side" not in row]})
        print(collectives.table(result))

    return Result(result, show)


@bench.command("network")
@json_or_table
def bench_network(
    hosts: Annotated[int, Option(help="hosts, each a network namespace with one rank")] = 3,
    rate: Annotated[
        float, Option(help="outgoing rate of each host's interface, in Mbit/s", callback=above_zero)
    ] = 200.0,
    sizes: Annotated[str | None, Option(help="bytes of the arrays, such as 1048576,4194304")] = None,
    algorithms: Annotated[
        str, Option(help="all-reduce algorithms, with commas between them")
    ] = "ring,rabenseifner,recursive_doubling",
    rounds: Annotated[int, Option(help="calls of each algorithm")] = 3,
) -> Result:
    """Time all-reduce between hosts with slow links (network namespaces; needs root), against the virtual clock."""
    from minidist.report.bench import network

    lengths = whole_numbers(sizes, "--sizes") if sizes else network.SIZES
    result = _measured(network.bench_network, hosts, 1e6 * rate, lengths, algorithms.split(","), rounds)

    def show() -> None:
        _show({**result, "rows": []})
        print(network.table(result))

    return Result(result, show)


@bench.command("step")
@json_or_table
def bench_step(
    cases: Cases = None,
    ranks: Annotated[int, Option(help="more than 1: a data-parallel step under mpiexec (one GPT case)")] = 1,
    tp: Annotated[int, Option(help="more than 1: a tensor-parallel step of GPT blocks under mpiexec")] = 1,
    against: Annotated[str | None, Option(help="torch, or none to measure minidist alone")] = "torch",
    zero: Annotated[
        str | None, Option(help="with --ranks: ZeRO stages, such as 1,2,3, next to data parallelism")
    ] = None,
    device: Annotated[str, Option(help="cpu or cuda, for both sides (one rank)")] = "cpu",
    rounds: Rounds = 8,
) -> Result:
    """Time a training step against PyTorch's best eager step on the same model, batch and optimizer."""
    from minidist.report.bench.parallel import bench_data_parallel
    from minidist.report.bench.step import bench_step as measure
    from minidist.report.bench.tensor_parallel import bench_tensor_parallel

    stages = _zero_stages(zero)
    if against not in ("torch", "none", None):
        raise UsageError(
            f"bench step --against {quoted(against)}{nearest(against, ['torch', 'none'])}; it can be torch or none"
        )
    _say_without_torch(against != "none")
    other = None if against == "none" else against

    if device != "cpu" and (tp > 1 or ranks > 1 or stages):
        raise UsageError(f"bench step --device {device} measures one rank; leave out --ranks, --tp and --zero")

    # A tensor-parallel step, a data-parallel step, or a step on one rank.
    if tp > 1:
        if cases or stages or ranks > 1:
            raise UsageError("bench step --tp has its own stack of GPT blocks: leave out the case, --ranks and --zero")
        return _result(bench_tensor_parallel, tp, rounds, other)
    if ranks > 1:
        return _result(bench_data_parallel, ranks, rounds, cases[0] if cases else "gpt", stages, other)
    if stages:
        raise UsageError("bench step --zero needs --ranks 2 or more: one rank has nothing to shard")
    return _result(measure, cases or None, rounds, device, other)


@bench.command("pipeline")
@json_or_table
def bench_pipeline(
    case: Annotated[str, Argument(help="gpt, gpt-512 or gpt-tiny")] = "gpt",
    stages: Annotated[int, Option(help="processes, a stage each")] = 2,
    schedule: Annotated[str, Option(help="1f1b or gpipe (others without a ratio to PyTorch)")] = "1f1b",
    microbatches: Annotated[int, Option(help="micro-batches of the batch of 8")] = 4,
    rounds: Rounds = 8,
) -> Result:
    """Time a pipeline step under mpiexec against torch.distributed.pipelining on gloo, and against one rank."""
    from minidist.report.bench.pipeline import bench_pipeline as measure

    _say_without_torch()
    return _result(measure, stages, schedule, microbatches, rounds, case)


@bench.command("memory")
@json_or_table
def bench_memory(cases: Cases = None, rounds: Rounds = 12) -> Result:
    """Measure what the memory account costs a training step, when it is on and when it keeps a timeline."""
    from minidist.report.bench.step import bench_memory as measure

    return _result(measure, cases or None, rounds)


@bench.command("hybrid")
@json_or_table
def bench_hybrid(
    dp: Annotated[int, Option(help="data-parallel ranks")] = 2,
    tp: Annotated[int, Option(help="tensor-parallel ranks")] = 2,
    pp: Annotated[int, Option(help="pipeline ranks")] = 2,
    rounds: Annotated[int, Option(help="interleaved rounds")] = 8,
) -> Result:
    """Measure the share of a hybrid step that is neither arithmetic nor messages, under mpiexec."""
    from minidist.report.bench.hybrid import bench_hybrid as measure

    return _result(measure, rounds, dp, tp, pp)


def _say_without_torch(compared: bool = True) -> None:
    """Say why the ratios to PyTorch will be missing."""
    from minidist.report.bench.environment import has_torch

    if compared and not has_torch():
        say("PyTorch is not installed, so there are no ratios to it; install it with: pip install 'minidist[peers]'")


def _measured(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return what a benchmark measures, and how busy other processes kept the machine; warn when they did."""
    from minidist.report.bench.environment import other_processes

    with other_processes() as others:
        result = measure(*arguments)
    result["environment"]["other_processes"] = others.cores
    if sentence := others.sentence():
        say(sentence)
    return result


def _result(measure: Callable[..., dict[str, Any]], *arguments: Any) -> Result:
    """Measure, and print the rows."""
    result = _measured(measure, *arguments)
    return Result(result, lambda: _show(result))


def _show(result: dict[str, Any]) -> None:
    """Print the environment, then one line per measurement, and below a step what its products take."""
    from minidist.report.bench.harness import ratio_and_goal
    from minidist.report.bench.products import lines

    shown = ("name", "ratio", "target", "median_s", "rounds", "products_s", "floor_s", "other_s", "torch_products_s")
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    for row in result["rows"]:
        extra = "".join(
            f"  {key} {value:.4g}" for key, value in row.items() if key not in shown and isinstance(value, int | float)
        )
        print(f"{row['name']:56} {ratio_and_goal(row)}  median {row['median_s']:.6f} s  rounds {row['rounds']}{extra}")
        if "products" in row:
            print("\n".join(lines(row)))


def _zero_stages(text: str | None) -> list[int]:
    """Return the stages of --zero."""
    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"--zero {quoted(text)}; write the stages with commas, such as 1,2,3")
    return [int(part) for part in parts]
