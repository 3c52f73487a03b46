"""Lesson 14: an MLP and an attention whose matrices are cut into tiles, forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, reduced_to_all

ROWS, WIDTH, HEAD = 3, 4, 2


def attention(qkv: np.ndarray, heads: int) -> np.ndarray:
    """Return softmax(Q K^T / sqrt(d)) V of (rows, 3 x heads x d), without a mask: (rows, heads x d)."""
    rows = qkv.shape[0]
    q, k, v = (part.reshape(rows, heads, -1).swapaxes(0, 1) for part in np.split(qkv, 3, axis=1))
    scores = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(max(1, q.shape[2])))
    mixed: np.ndarray = (scores / scores.sum(-1, keepdims=True)) @ v
    return mixed.swapaxes(0, 1).reshape(rows, -1)


# --- the MLP ---


def mlp_parts(case: Case) -> dict[str, np.ndarray]:
    """Return whole matrices of integers, with `case.size` columns of A for each rank; any order of adding is exact."""
    draw, hidden = case.generator(), case.ranks * case.size
    shapes = {
        "x": (ROWS, WIDTH),
        "a": (WIDTH, hidden),
        "b": (hidden, WIDTH),
        "bias": (WIDTH,),
        "gradient": (ROWS, WIDTH),
    }
    return {name: draw.integers(-4, 5, shape) * 1.0 for name, shape in shapes.items()}


def mlp_arguments(case: Case, rank: int) -> tuple[Any, ...]:
    parts, mine = mlp_parts(case), slice(rank * case.size, (rank + 1) * case.size)
    return parts["x"], parts["a"][:, mine].copy(), parts["b"][mine].copy(), parts["bias"], parts["gradient"]


def mlp_truth(
    case: Case, bias_times: float = 1.0, forward: bool = True, backward: bool = True, mean: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and x's gradient; without the ReLU forward or its mask backward, or with a mean over the ranks."""
    p = mlp_parts(case)
    hidden = p["x"] @ p["a"]
    mask = hidden > 0 if backward else True
    hidden = np.maximum(hidden, 0) if forward else hidden
    y = hidden @ p["b"] / (case.ranks if mean else 1)
    return y + bias_times * p["bias"], ((p["gradient"] @ p["b"].T) * mask) @ p["a"].T


def partial(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what a rank has before anything is summed: its part of y (with the bias) and of the input's gradient."""
    p, mine = mlp_parts(case), slice(rank * case.size, (rank + 1) * case.size)
    hidden = np.maximum(p["x"] @ p["a"][:, mine], 0)
    return hidden @ p["b"][mine] + p["bias"], ((p["gradient"] @ p["b"][mine].T) * (hidden > 0)) @ p["a"][:, mine].T


def answers(f: Failure, make: Callable[[Case, int], tuple[np.ndarray, np.ndarray]]) -> bool:
    return f.answers_are([make(f.case, rank) for rank in range(f.case.ranks)])


# --- attention ---


def attention_parts(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return x, fused Q|K|V, projection, heads: `case.size` heads of 2 on each rank (one when the size is 0)."""
    draw, heads = case.generator(), case.ranks * max(1, case.size % 4)
    width = heads * HEAD
    return (
        draw.normal(size=(ROWS, WIDTH)),
        draw.normal(size=(WIDTH, 3 * width)),
        draw.normal(size=(width, WIDTH)),
        heads,
    )


def attention_arguments(case: Case, rank: int) -> tuple[Any, ...]:
    return (*attention_parts(case), attention)


def attention_truth(case: Case) -> Sequence[np.ndarray]:
    x, qkv, projection, heads = attention_parts(case)
    return [attention(x @ qkv, heads) @ projection] * case.ranks


def attention_by_tiles(
    case: Case, contiguous: bool = False, all_heads: bool = False, summed: bool = True
) -> list[np.ndarray]:
    """Return what comes out when the fused matrix is cut contiguously, the number of heads kept, or nothing summed."""
    x, qkv, projection, heads = attention_parts(case)
    n, width = case.ranks, qkv.shape[1] // 3
    parts = []
    for rank in range(n):
        mine = slice(rank * width // n, (rank + 1) * width // n)
        tile = np.concatenate([part[:, mine] for part in np.split(qkv, 3, axis=1)], axis=1)
        if contiguous:
            tile = np.split(qkv, n, axis=1)[rank]
        some = heads if all_heads and tile.shape[1] % (3 * heads) == 0 else heads // n
        parts.append(attention(x @ tile, some) @ projection[mine])
    return [sum(parts[1:], parts[0])] * n if summed else parts


EXERCISES = [
    Exercise(
        name="14.parallel_mlp",
        arguments=mlp_arguments,
        expected=lambda case: [mlp_truth(case)] * case.ranks,
        least=reduced_to_all(lambda case: 2 * WIDTH * min(ROWS, case.size)),
        par=Case(4, 8),
        unit="column",
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, {case.size} column{'s' * (case.size != 1)} of A on each"
        ),
        limits=("bytes",),
        for_hints={
            "summed_twice": lambda f: f.answers_are([mlp_truth(f.case, f.case.ranks)] * f.case.ranks),
            "forward_not_summed": lambda case: [mlp_truth(case, backward=False)] * case.ranks,
            "gradient_not_summed": lambda case: [mlp_truth(case, forward=False)] * case.ranks,
            "averaged": lambda case: [mlp_truth(case, mean=True)] * case.ranks,
            "neither_summed": lambda f: answers(f, partial),
            "output_is_right": lambda f: answers(f, lambda case, rank: (mlp_truth(case)[0], partial(case, rank)[1])),
            "gradient_is_right": lambda f: answers(f, lambda case, rank: (partial(case, rank)[0], mlp_truth(case)[1])),
        },
    ),
    Exercise(
        name="14.parallel_attention",
        arguments=attention_arguments,
        expected=attention_truth,
        par=Case(4, 2),
        label=lambda case: f"{case.ranks} rank{'s' * (case.ranks != 1)}, {case.ranks * max(1, case.size % 4)} heads",
        limits=("bytes",),
    ),
]
