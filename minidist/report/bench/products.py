"""The matrix products of a step: what they take in it, and the least that the same products take alone.

    step 245 ms  =  products 165 ms (1.04 of their floor of 158 ms)  +  everything else 80 ms

A few steps are run with `arrays.matmul` and `arrays.host_product` recorded. Each product of two matrices, told apart by
shapes and memory layouts, is then measured alone in every way in which NumPy computes it: as it is, with the result by
columns, with a copied operand, and in two parts along the inner dimension. The floor is the sum of the fastest ways.
Where PyTorch is installed, its products of the same operands are measured in the same rounds.

Proved by: tests/bench/test_products.py
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from minidist.core.base import arrays as xp
from minidist.report.bench.environment import has_torch
from minidist.report.bench.harness import Step, interleave, seconds_per_call

STEPS = 5  # that are recorded
ROUNDS, SECONDS = 7, 0.002  # of each way of one product


class Layout(NamedTuple):
    """Shape, strides in bytes, and dtype of an operand."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        stored_by_columns = self.strides[-1] > self.strides[-2]
        return "x".join(map(str, self.shape)) + ".T" * stored_by_columns


class Product(NamedTuple):
    """A product of two matrices, or of as many pairs as the leading dims say, with its result."""

    a: Layout
    b: Layout
    out: Layout


@contextmanager
def recording() -> Iterator[dict[Product, list[float]]]:
    """Yield the seconds of each call of every product inside the block; products with a vector do not count."""
    calls: dict[Product, list[float]] = {}
    names = ("matmul", "host_product")
    originals = {name: getattr(xp, name) for name in names}

    def timed(multiply: Callable[..., Any], a: Any, b: Any, out: Any = None) -> Any:
        start = time.perf_counter()
        result = multiply(a, b, out=out)
        seconds = time.perf_counter() - start
        if a.ndim > 1 and b.ndim > 1:
            product = Product(*(Layout(x.shape, x.strides, x.dtype.str) for x in (a, b, result)))
            calls.setdefault(product, []).append(seconds)
        return result

    for name in names:
        setattr(xp, name, partial(timed, originals[name]))
    try:
        yield calls
    finally:
        for name in names:
            setattr(xp, name, originals[name])


def measure_products(step: Step, step_s: float) -> dict[str, Any]:
    """Return {products_s, floor_s, other_s, torch_products_s, products}: seconds per step, and a row per product.

    step_s: what a step takes; other_s is what is left of it. torch_products_s is None without PyTorch. A row is
    {shapes, calls, seconds, floor, fastest, torch}, all of them per step; the slowest product comes first.
    """
    with recording() as calls:
        for _ in range(STEPS):
            step()
    rows = [_row(product, seconds) for product, seconds in calls.items()]
    rows.sort(key=lambda row: -row["seconds"])
    products = sum(row["seconds"] for row in rows)
    return {
        "products_s": products,
        "floor_s": sum(row["floor"] for row in rows),
        "other_s": step_s - products,
        "torch_products_s": sum(row["torch"] for row in rows) if has_torch() else None,
        "products": rows,
    }


def _row(product: Product, seconds: list[float]) -> dict[str, Any]:
    """Measure a product alone, and return its row. A median, because another process may take the processor."""
    number = len(seconds) / STEPS
    alone = measure_alone(product)
    theirs = alone.pop("torch", None)
    fastest = min(alone, key=alone.__getitem__)
    return {
        "shapes": f"{product.a} @ {product.b}",
        "calls": number,
        "seconds": number * statistics.median(seconds),
        "floor": number * alone[fastest],
        "fastest": fastest,
        "torch": None if theirs is None else number * theirs,
    }


def measure_alone(product: Product) -> dict[str, float]:
    """Return the seconds of a call of each way of a product, medians of interleaved rounds; "torch" if installed."""
    a, b, out = (_operand(layout) for layout in product)
    found = ways(a, b, out)
    if has_torch():
        import torch

        torch.set_num_threads(1)
        left, right, result = (torch.from_numpy(x) for x in (a, b, out))
        found["torch"] = lambda: torch.matmul(left, right, out=result)

    # As many calls per round as make it long enough for the clock.
    calls = {}
    for name, way in found.items():
        way()
        calls[name] = max(1, round(SECONDS / max(seconds_per_call(way, 1), 1e-7)))
    times = interleave(list(found), ROUNDS, lambda name: seconds_per_call(found[name], calls[name]))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def ways(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return the ways in which NumPy computes a @ b, by name; "by columns" has its result in another array."""
    columns = np.empty((*out.shape[:-2], out.shape[-1], out.shape[-2]), out.dtype).swapaxes(-1, -2)
    half, rest = a.shape[-1] // 2, np.empty(out.shape, out.dtype)

    def two_parts() -> None:
        np.matmul(a[..., :half], b[..., :half, :], out=out)
        np.matmul(a[..., half:], b[..., half:, :], out=rest)
        np.add(out, rest, out=out)

    return {
        "as it is": lambda: np.matmul(a, b, out=out),
        "first copied": lambda: np.matmul(np.ascontiguousarray(a), b, out=out),
        "second copied": lambda: np.matmul(a, np.ascontiguousarray(b), out=out),
        "by columns": lambda: np.matmul(a, b, out=columns),
        "two parts": two_parts,
    }


def lines(row: dict[str, Any], most: int = 8) -> list[str]:
    """Format what a step's products take: one line for all, and one for each of the slowest."""

    def times(seconds: float, floor: float, torch: float | None) -> str:
        theirs = "" if torch is None else f"; PyTorch's {1e3 * torch:.3f} ms"
        return f"{1e3 * seconds:.3f} ms, {seconds / floor:.2f} of the floor {1e3 * floor:.3f} ms{theirs}"

    found = [
        f"    products {times(row['products_s'], row['floor_s'], row['torch_products_s'])};"
        f" everything else {1e3 * row['other_s']:.3f} ms"
    ]
    for one in row["products"][:most]:
        found.append(
            f"    {one['shapes']:28} {one['calls']:4g} calls  {times(one['seconds'], one['floor'], one['torch'])}"
            f" ({one['fastest']})"
        )
    return found


def _operand(layout: Layout) -> np.ndarray:
    """Return random numbers in memory of this layout."""
    dtype = np.dtype(layout.dtype)
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    values = np.random.default_rng(0).standard_normal(last // dtype.itemsize + 1).astype(dtype)
    return as_strided(values, layout.shape, layout.strides)
