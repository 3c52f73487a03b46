"""UCSD CSE 234, programming assignments 2 and 3: collectives from send and receive, naive tensor parallelism, experts.

myAllreduce(comm, src_array, dest_array, op)          op: "sum", "min" or "max"; fills dest_array
myAlltoall(comm, src_array, dest_array)               fills dest_array
get_info(comm, rank, mp_size, dp_size, fc_layer, in_dim, out_dim)
    returns mp_idx, dp_idx, mp_comm, dp_comm, part_in_dim, part_out_dim
split_data(x_train, y_train, mp_size, dp_size, rank)  the rows of this rank's replica of mp_size ranks
naive_collect_forward_input(x, mp_comm, mp_size)      the last dimension, gathered
naive_collect_forward_output(out, mp_comm, mp_size)
naive_collect_backward_output(output_grad, mp_group_idx, mp_size)   this rank's part of the last dimension
naive_collect_backward_x(grad_x, mp_comm, mp_size)    summed, this rank's part of the last dimension
MoE_EP(router, expert, topk, comm)                    `forward(x)` returns every row's mixture of experts
    Rank r has expert r; all ranks have the router and the rows x. `router(x, topk)` returns the numbers of each
    row's experts and their weights, (rows, topk) both, and `expert(rows)` this rank's results
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Least, drawing, reduced_to_all
from minidist.course.lesson.hint_file import hints_of

FOLD: dict[str, Callable[..., np.ndarray]] = {"sum": np.sum, "min": np.min, "max": np.max}
LAYERS = ("fc_q", "fc_k", "fc_v", "fc_o")
Adapter = Callable[[Mapping[str, Any]], Callable[..., Any]]


def data(case: Case, rank: int) -> np.ndarray:
    return case.generator(rank).integers(-50, 50, case.size).astype(float)


def operation(case: Case) -> str:
    return ("sum", "min", "max")[(case.seed + case.size) % 3]


def filled_by(name: str) -> Adapter:
    """Return the adapter of a function that fills an array."""

    def adapter(functions: Mapping[str, Any]) -> Callable[..., Any]:
        def run(comm: Comm, source: np.ndarray, *more: Any) -> np.ndarray:
            result = np.zeros_like(source)
            functions[name](comm, source, result, *more)
            return result

        return run

    return adapter


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


def use_split_data(functions: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda comm, x, y, mp, dp: tuple(functions["split_data"](x, y, mp, dp, comm.rank))


def training_set(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels, as many for each replica, all different."""
    _, dp, *_ = shape(case)
    rows = dp * case.size
    return np.arange(rows * 6.0).reshape(rows, 2, 3), np.arange(rows)


def splits(case: Case) -> list[tuple[np.ndarray, ...]]:
    mp, dp, *_ = shape(case)
    parts = [np.split(array, dp) for array in training_set(case)]
    return [tuple(part[rank // mp] for part in parts) for rank in range(case.ranks)]


def whole(case: Case) -> np.ndarray:
    """Return (batch, sequence, features) numbers, as many features on each rank."""
    return case.generator().integers(-9, 9, (2, 3, case.ranks * (1 + case.size % 4))).astype(float)


def part(array: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    return np.ascontiguousarray(np.split(array, ranks, axis=-1)[rank])


def gradients(case: Case, rank: int) -> np.ndarray:
    return case.generator(rank, 3).integers(-9, 9, whole(case).shape).astype(float)


WIDTH, HIDDEN, OUT = 3, 4, 2


@dataclass
class Expert:
    """Two layers with a ReLU between them, different for each number."""

    number: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        first, second = (
            np.random.default_rng([self.number, *sizes]).normal(size=sizes)
            for sizes in ((WIDTH, HIDDEN), (HIDDEN, OUT))
        )
        result: np.ndarray = np.maximum(rows @ first, 0) @ second
        return result


@dataclass
class Router:
    """Returns the `topk` experts of each row and the softmax of their logits."""

    weight: np.ndarray

    def __call__(self, x: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
        logits = x @ self.weight
        indices = np.argsort(-logits, axis=1)[:, :topk]
        gates = np.exp(np.take_along_axis(logits, indices, axis=1))
        return indices, gates / gates.sum(axis=1, keepdims=True)


def mixture(case: Case) -> tuple[Router, np.ndarray, int]:
    """Return the router, the rows, and the number of experts of a row."""
    draw = case.generator()
    return Router(draw.normal(size=(WIDTH, case.ranks))), draw.normal(size=(case.size, WIDTH)), min(2, case.ranks)


def use_moe(functions: Mapping[str, Any]) -> Callable[..., Any]:
    def run(comm: Comm, router: Router, x: np.ndarray, topk: int, expert: Expert) -> Any:
        return functions["MoE_EP"](router, expert, topk, comm).forward(x)

    return run


def mixed(case: Case, gated: bool = True) -> np.ndarray:
    """Return the outputs of all rows, with every expert on one device."""
    router, x, topk = mixture(case)
    indices, gates = router(x, topk)
    of_expert = np.stack([Expert(number)(x) for number in range(case.ranks)], axis=1)
    chosen = np.take_along_axis(of_expert, indices[..., None], axis=1)
    total: np.ndarray = (chosen * (gates[..., None] if gated else 1)).sum(axis=1)
    return total


def from_other_ranks(case: Case) -> Least:
    """Return the least with which each rank knows every row that has an expert on another rank."""
    router, x, topk = mixture(case)
    indices, _ = router(x, topk)
    rows = [np.count_nonzero(np.any(indices != rank, axis=1)) for rank in range(case.ranks)]
    return Least(sum(int(count > 0) for count in rows), 8 * OUT * int(sum(rows)))


def _cases() -> list[Case]:
    return [Case(ranks, size) for ranks in (1, 2, 3, 4, 8) for size in (1, 3, 4, 8)]


def parts_travel(case: Case) -> Least:
    return Least(2 * (case.ranks - 1), 8 * (case.ranks - 1) * whole(case).size)


def _tensor_parallel(name: str, arguments: Any, expected: Any, least: Any = parts_travel) -> Exercise:
    """Return the exercise of a function of an array, the communicator, or the rank where nothing is sent, and ranks."""

    def adapter(functions: Mapping[str, Any]) -> Callable[..., Any]:
        return lambda comm, x: functions[name](x, comm.rank if least is None else comm, comm.size)

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
        adapter=adapter,
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
        written_by_hand=("minidist.core.collectives", "minidist.collectives"),
        functions=("myAllreduce",),
        adapter=filled_by("myAllreduce"),
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
        written_by_hand=("minidist.core.collectives", "minidist.collectives"),
        functions=("myAlltoall",),
        adapter=filled_by("myAlltoall"),
    ),
    Exercise(
        name="cse234.get_info",
        arguments=lambda case, rank: shape(case),
        expected=info,
        cases=lambda: [Case(ranks, size) for ranks in (1, 2, 3, 4, 6, 8) for size in range(4)],
        draw=drawing((1, 12), (0, 9)),
        par=Case(8, 1),
        label=lambda case: "mp {}, dp {}, {}, {} to {} features".format(*shape(case)),
        functions=("get_info",),
        adapter=use_get_info,
    ),
    Exercise(
        name="cse234.split_data",
        arguments=lambda case, rank: (*training_set(case), *shape(case)[:2]),
        expected=splits,
        cases=lambda: [Case(ranks, size) for ranks in (1, 2, 4, 6, 8) for size in (1, 3)],
        draw=drawing((1, 12), (1, 9)),
        par=Case(8, 1),
        label=lambda case: "mp {}, dp {}, {} rows".format(*shape(case)[:2], len(training_set(case)[1])),
        functions=("split_data",),
        adapter=use_split_data,
    ),
    Exercise(
        name="cse234.MoE_EP",
        arguments=lambda case, rank: (*mixture(case), Expert(rank)),
        expected=lambda case: [mixed(case)] * case.ranks,
        cases=_cases,
        draw=drawing((1, 8), (1, 9)),
        least=from_other_ranks,
        par=Case(4, 8),
        unit="row",
        functions=("MoE_EP",),
        adapter=use_moe,
        for_hints={"without_gates": lambda case: [mixed(case, gated=False)] * case.ranks},
    ),
    _tensor_parallel(
        "naive_collect_forward_input",
        lambda case, rank: (part(whole(case), rank, case.ranks),),
        lambda case: [whole(case)] * case.ranks,
    ),
    _tensor_parallel(
        "naive_collect_forward_output",
        lambda case, rank: (part(whole(case), rank, case.ranks),),
        lambda case: [whole(case)] * case.ranks,
    ),
    _tensor_parallel(
        "naive_collect_backward_output",
        lambda case, rank: (whole(case),),
        lambda case: [part(whole(case), rank, case.ranks) for rank in range(case.ranks)],
        None,
    ),
    _tensor_parallel(
        "naive_collect_backward_x",
        lambda case, rank: (gradients(case, rank),),
        lambda case: [
            part(np.sum([gradients(case, r) for r in range(case.ranks)], axis=0), rank, case.ranks)
            for rank in range(case.ranks)
        ],
    ),
]
