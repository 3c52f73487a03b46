"""CMU 11-868, distributed training homework: data parallelism and the clock cycles of a pipeline.

partition_dataset(rank, world_size, dataset, batch_size)   yields this rank's batches: its share of each whole batch
average_gradients(model, comm)                             in place: the mean over the ranks
_clock_cycles(num_batches, num_partitions)                 per clock, the pairs (micro-batch, partition) that run
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from minidist.core.comm import Comm
from minidist.core.nn import MLP
from minidist.course.lesson.exercise import Case, Exercise, difference, drawing, reduced_to_all
from minidist.nn import mse_loss


def use_partition(functions: Mapping[str, Any]) -> Callable[..., Any]:
    def run(world_size: int, dataset: Sequence[int], batch_size: int) -> Any:
        parts = [functions["partition_dataset"](rank, world_size, dataset, batch_size) for rank in range(world_size)]
        return [[[int(sample) for sample in batch] for batch in batches] for batches in parts]

    return run


def check_partition(case: Case, answers: Sequence[Any]) -> str:
    """Check that the parts are disjoint, cover the data, are equal up to one sample, and share the batch."""
    parts = [[sample for batch in batches for sample in batch] for batches in answers[0]]
    if sorted(sample for part in parts for sample in part) != list(range(case.size)):
        return f"the {case.ranks} parts together are not the {case.size} samples, each once"
    lengths = [len(part) for part in parts]
    if max(lengths) - min(lengths) > 1:
        return f"the parts have {', '.join(map(str, lengths))} samples; they may differ by one"
    for rank, batches in enumerate(answers[0]):
        sizes = [len(batch) for batch in batches]
        if any(size != 4 for size in sizes[:-1]) or max(sizes, default=0) > 4:
            return (
                f"rank {rank}'s batches have {', '.join(map(str, sizes))} samples; {4 * case.ranks} for all ranks is 4"
                " for each, and fewer in the last batch only"
            )
    return ""


def data(case: Case, rank: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the width of a model, and a batch of each rank's own."""
    draw = case.generator(rank)
    return 1 + case.size, draw.normal(size=(4, 3)), draw.normal(size=(4, 2))


def model_of(width: int, x: np.ndarray, y: np.ndarray) -> MLP:
    """Return a model after its backward pass."""
    model = MLP([3, width, 2], dtype=np.float64, seed=0)
    mse_loss(model(x), y).backward()
    return model


def gradients(model: MLP) -> tuple[np.ndarray, ...]:
    return tuple(np.array(parameter.grad) for parameter in model.parameters())


def use_average(functions: Mapping[str, Any]) -> Callable[..., Any]:
    def run(comm: Comm, model: MLP) -> Any:
        functions["average_gradients"](model, comm)
        return gradients(model)

    return run


def mean_gradients(case: Case) -> tuple[np.ndarray, ...]:
    of_rank = [gradients(model_of(*data(case, rank))) for rank in range(case.ranks)]
    return tuple(np.mean(parts, axis=0) for parts in zip(*of_rank, strict=True))


def use_clock_cycles(functions: Mapping[str, Any]) -> Callable[..., Any]:
    def run(num_batches: int, num_partitions: int) -> Any:
        return [sorted(map(tuple, clock)) for clock in functions["_clock_cycles"](num_batches, num_partitions)]

    return run


def check_clock_cycles(case: Case, answers: Sequence[Any]) -> str:
    cells = sorted(np.ndindex(case.size, case.seed), key=sum)
    wanted = [sorted(clock) for _, clock in groupby(cells, key=sum)]
    if len(answers[0]) != len(wanted):
        return f"{len(answers[0])} clocks; {case.size} micro-batches on {case.seed} partitions take {len(wanted)}"
    for clock, (got, expected) in enumerate(zip(answers[0], wanted, strict=True)):
        if got != expected:
            return f"clock {clock} runs {got}; expected {expected}"
    return ""


EXERCISES = [
    Exercise(
        name="llmsys.partition_dataset",
        arguments=lambda case, rank: (case.ranks, list(range(case.size)), 4 * case.ranks),
        check_answers=check_partition,
        cases=lambda: [Case(ranks, size) for ranks in (1, 2, 3, 4, 8) for size in (8, 9, 17)],
        par=Case(4, 17),
        draw=drawing((1, 9), (9, 60)),
        label=lambda case: f"{case.size} samples for {case.ranks} ranks",
        communicates=False,
        generator=True,
        functions=("partition_dataset",),
        adapter=use_partition,
    ),
    Exercise(
        name="llmsys.average_gradients",
        arguments=data,
        setup=lambda comm, *values: (model_of(*values),),
        expected=lambda case: [mean_gradients(case)] * case.ranks,
        cases=lambda: [Case(ranks, size) for ranks in (1, 2, 3, 4) for size in (1, 3)],
        draw=drawing((1, 8), (1, 9)),
        least=reduced_to_all(lambda case: sum(array.size for array in gradients(model_of(*data(case, 0))))),
        par=Case(4, 3),
        unit="hidden feature",
        for_hints={
            "summed": lambda f: not difference(f.answers[0], tuple(f.case.ranks * g for g in f.expected[0]), 1e-09),
            "own_gradient": lambda f: not difference(f.answers[0], gradients(model_of(*data(f.case, 0))), 1e-09),
        },
        functions=("average_gradients",),
        adapter=use_average,
    ),
    Exercise(
        name="llmsys.clock_cycles",
        arguments=lambda case, rank: (case.size, case.seed),
        check_answers=check_clock_cycles,
        cases=lambda: [Case(1, m, p) for m in (1, 2, 3, 5) for p in (1, 2, 3, 4)],
        draw=drawing((1, 1), (1, 12), (1, 9)),
        par=Case(1, 4, 3),
        label=lambda case: f"{case.size} micro-batches, {case.seed} partitions",
        communicates=False,
        generator=True,
        functions=("_clock_cycles",),
        adapter=use_clock_cycles,
    ),
]
