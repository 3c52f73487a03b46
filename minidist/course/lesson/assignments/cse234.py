"""UCSD CSE 234, programming assignment 2: two collectives from send and receive, and naive tensor parallelism.

    myAllreduce(comm, src_array, dest_array, op)          op: "sum", "min" or "max"; fills dest_array
    myAlltoall(comm, src_array, dest_array)               fills dest_array
    get_info(comm, rank, mp_size, dp_size, fc_layer, in_dim, out_dim)
        returns mp_idx, dp_idx, mp_comm, dp_comm, part_in_dim, part_out_dim
    naive_collect_forward_input(x, mp_comm, mp_size)      the last dimension, gathered
    naive_collect_forward_output(out, mp_comm, mp_size)
    naive_collect_backward_output(output_grad, mp_group_idx, mp_size)   this rank's part of the last dimension
    naive_collect_backward_x(grad_x, mp_comm, mp_size)    summed, this rank's part of the last dimension

Proved by: tests/lesson/test_assignments.py, tests/lesson/test_assignment_checks.py
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Least, drawing, reduced_to_all
from minidist.course.lesson.hint_file import hints_of

FOLD: dict[str, Callable[..., np.ndarray]] = {"sum": np.sum, "min": np.min, "max": np.max}
LAYERS = ("fc_q", "fc_k", "fc_v", "fc_o")


def data(case: Case, rank: int) -> np.ndarray:
    return case.generator(rank).integers(-50, 50, case.size).astype(float)


def operation(case: Case) -> str:
    return ("sum", "min", "max")[(case.seed + case.size) % 3]


def use_all_reduce(functions: Mapping[str, Any]) -> Callable[..., Any]:
    def run(comm: Comm, source: np.ndarray, op: str) -> np.ndarray:
        result = np.zeros_like(source)
        functions["myAllreduce"](comm, source, result, op)
        return result

    return run


def use_all_to_all(functions: Mapping[str, Any]) -> Callable[..., Any]:
    def run(comm: Comm, source: np.ndarray) -> np.ndarray:
        result = np.zeros_like(source)
        functions["myAlltoall"](comm, source, result)
        return result

    return run


def blocks(case: Case, rank: int) -> np.ndarray:
    """Return what a rank sends: as many numbers to each rank."""
    return case.generator(rank).integers(-50, 50, case.size * case.ranks).astype(float)


def received(case: Case) -> list[np.ndarray]:
    sent = [blocks(case, rank).reshape(case.ranks, case.size) for rank in range(case.ranks)]
    return [np.concatenate([of_rank[rank] for of_rank in sent]) for rank in range(case.ranks)]


def shape(case: Case) -> tuple[int, int, str, int, int]:
    """Return mp_size, dp_size, a layer, and its dimensions."""
    degrees = [n for n in range(1, case.ranks + 1) if case.ranks % n == 0]
    draw = case.generator(1)
    mp = int(draw.choice(degrees))
    return mp, case.ranks // mp, str(draw.choice(LAYERS)), mp * int(draw.integers(1, 9)), mp * int(draw.integers(1, 9))


def use_get_info(functions: Mapping[str, Any]) -> Callable[..., Any]:
    def run(comm: Comm, *arguments: Any) -> Any:
        mp_idx, dp_idx, mp_comm, dp_comm, part_in, part_out = functions["get_info"](comm, comm.rank, *arguments)
        return np.array([mp_idx, dp_idx, part_in, part_out]), np.array(mp_comm.members), np.array(dp_comm.members)

    return run


def info(case: Case) -> list[tuple[np.ndarray, ...]]:
    mp, dp, layer, in_dim, out_dim = shape(case)
    parts = (in_dim // mp, out_dim) if layer == "fc_o" else (in_dim, out_dim // mp)
    return [
        (np.array([rank % mp, rank // mp, *parts]), rank // mp * mp + np.arange(mp), rank % mp + mp * np.arange(dp))
        for rank in range(case.ranks)
    ]


def whole(case: Case) -> np.ndarray:
    """Return (batch, sequence, features) numbers, as many features on each rank."""
    return case.generator().integers(-9, 9, (2, 3, case.ranks * (1 + case.size % 4))).astype(float)


def part(array: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    return np.ascontiguousarray(np.split(array, ranks, axis=-1)[rank])


def use_forward_input(functions: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda comm, x: functions["naive_collect_forward_input"](x, comm, comm.size)


def use_forward_output(functions: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda comm, x: functions["naive_collect_forward_output"](x, comm, comm.size)


def use_backward_output(functions: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda comm, gradient: functions["naive_collect_backward_output"](gradient, comm.rank, comm.size)


def use_backward_x(functions: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda comm, gradient: functions["naive_collect_backward_x"](gradient, comm, comm.size)


def gradients(case: Case, rank: int) -> np.ndarray:
    return case.generator(rank, 3).integers(-9, 9, whole(case).shape).astype(float)


def _cases() -> list[Case]:
    return [Case(ranks, size) for ranks in (1, 2, 3, 4, 8) for size in (1, 3, 4, 8)]


def parts_travel(case: Case) -> Least:
    return Least(2 * (case.ranks - 1), 8 * (case.ranks - 1) * whole(case).size)


def _tensor_parallel(name: str, use: Any, arguments: Any, expected: Any, least: Any = parts_travel) -> Exercise:
    return Exercise(
        name=f"cse234.{name}",
        arguments=arguments,
        expected=expected,
        least=least,
        cases=_cases,
        draw=drawing((1, 8), (0, 8)),
        par=Case(4, 3),
        unit="feature",
        hints=hints_of(globals(), "cse234"),
        functions=(name,),
        adapter=use,
    )


EXERCISES = [
    Exercise(
        name="cse234.myAllreduce",
        arguments=lambda case, rank: (data(case, rank), operation(case)),
        expected=lambda case: (
            [FOLD[operation(case)]([data(case, rank) for rank in range(case.ranks)], axis=0)] * case.ranks
        ),
        least=reduced_to_all(lambda case: case.size),
        par=Case(4, 16),
        hints=hints_of(globals(), "cse234.myAllreduce"),
        written_by_hand=("minidist.core.collectives", "minidist.collectives"),
        functions=("myAllreduce",),
        adapter=use_all_reduce,
    ),
    Exercise(
        name="cse234.myAlltoall",
        arguments=lambda case, rank: (blocks(case, rank),),
        expected=received,
        cases=_cases,
        draw=drawing((1, 8), (1, 9)),
        least=lambda case: Least(2 * (case.ranks - 1) * (case.size > 0), 8 * case.ranks * (case.ranks - 1) * case.size),
        par=Case(4, 4),
        unit="element per pair",
        hints=hints_of(globals(), "cse234.myAlltoall"),
        written_by_hand=("minidist.core.collectives", "minidist.collectives"),
        functions=("myAlltoall",),
        adapter=use_all_to_all,
    ),
    Exercise(
        name="cse234.get_info",
        arguments=lambda case, rank: shape(case),
        expected=info,
        cases=lambda: [Case(ranks, size) for ranks in (1, 2, 3, 4, 6, 8) for size in range(4)],
        draw=drawing((1, 12), (0, 9)),
        par=Case(8, 1),
        label=lambda case: "mp {}, dp {}, {}, {} to {} features".format(*shape(case)),
        hints=hints_of(globals(), "cse234.get_info"),
        functions=("get_info",),
        adapter=use_get_info,
    ),
    _tensor_parallel(
        "naive_collect_forward_input",
        use_forward_input,
        lambda case, rank: (part(whole(case), rank, case.ranks),),
        lambda case: [whole(case)] * case.ranks,
    ),
    _tensor_parallel(
        "naive_collect_forward_output",
        use_forward_output,
        lambda case, rank: (part(whole(case), rank, case.ranks),),
        lambda case: [whole(case)] * case.ranks,
    ),
    _tensor_parallel(
        "naive_collect_backward_output",
        use_backward_output,
        lambda case, rank: (whole(case),),
        lambda case: [part(whole(case), rank, case.ranks) for rank in range(case.ranks)],
        None,
    ),
    _tensor_parallel(
        "naive_collect_backward_x",
        use_backward_x,
        lambda case, rank: (gradients(case, rank),),
        lambda case: [
            part(np.sum([gradients(case, r) for r in range(case.ranks)], axis=0), rank, case.ranks)
            for rank in range(case.ranks)
        ],
    ),
]
