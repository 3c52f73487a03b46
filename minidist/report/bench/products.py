"""The matrix products of a step: what they take in it, and the least that NumPy takes for them there.

    step 245 ms  =  products 165 ms (1.04 of their floor of 158 ms)  +  everything else 80 ms

Steps are run with `arrays.matmul` and `arrays.host_product` replaced. Each step computes its products in another one of
the ways in which NumPy can: as it is, with a copied operand, with the result by columns, and in two parts along the
inner dimension. Products are told apart by shapes and memory layouts; the floor is the sum of the fastest ways. Where
PyTorch is installed, it is one more way, which does not count for the floor.

All ways are measured within the step because time depends on where the operands are. Alone and repeated, a product
finds them in the processor's cache; in a step much else is used in between, and it finds its weight in main memory or a
cache further away. A ratio to products alone would depend on the size of the caches, not on how the step computes.

Proved by: tests/bench/test_products.py
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minidist.core.base import arrays as xp
from minidist.report.bench.environment import has_torch
from minidist.report.bench.harness import Step

ROUNDS, SECONDS = 7, 0.3  # of each way: at least this number of steps, and more where a step is short


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
def recording(way: str = "as it is") -> Iterator[dict[Product, list[float]]]:
    """Yield the seconds of each call of every product inside the block; products with a vector do not count.

    way: of `ways`, in which they are computed; "as it is" calls what the step calls.
    """
    calls: dict[Product, list[float]] = {}
    names = ("matmul", "host_product")
    originals = {name: getattr(xp, name) for name in names}

    def timed(multiply: Callable[..., Any], a: Any, b: Any, out: Any = None) -> Any:
        if a.ndim < 2 or b.ndim < 2:
            return multiply(a, b, out=out)
        if way == "as it is":
            compute: Callable[[], Any] = partial(multiply, a, b, out=out)
        else:
            if out is None:
                shape = *np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]
                out = np.empty(shape, a.dtype)
            compute = ways(a, b, out)[way]
        start = time.perf_counter()
        result = compute()
        seconds = time.perf_counter() - start
        if way == "by columns":
            out[...] = result
        result = result if out is None else out
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
    names = list(ways(*[np.empty((0, 0))] * 3))
    rounds = max(ROUNDS, round(SECONDS / max(step_s, 1e-4)))
    found: dict[Product, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name in names:
            with recording(name) as calls:
                step()
            for product, seconds in calls.items():
                found.setdefault(product, {}).setdefault(name, []).extend(seconds)
    rows = [_row(product, seconds, rounds) for product, seconds in found.items()]
    rows.sort(key=lambda row: -row["seconds"])
    products = sum(row["seconds"] for row in rows)
    return {
        "products_s": products,
        "floor_s": sum(row["floor"] for row in rows),
        "other_s": step_s - products,
        "torch_products_s": sum(row["torch"] for row in rows) if has_torch() else None,
        "products": rows,
    }


def _row(product: Product, seconds: dict[str, list[float]], rounds: int) -> dict[str, Any]:
    """Return the row of a product, from the seconds of its calls in each way, in `rounds` steps of that way.

    Medians, because another process may take the processor.
    """
    number = len(seconds["as it is"]) / rounds
    medians = {name: number * statistics.median(calls) for name, calls in seconds.items()}
    theirs = medians.pop("torch", None)
    fastest = min(medians, key=medians.__getitem__)
    return {
        "shapes": f"{product.a} @ {product.b}",
        "calls": number,
        "seconds": medians["as it is"],
        "floor": medians[fastest],
        "fastest": fastest,
        "torch": theirs,
    }


def ways(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return the ways in which NumPy computes a @ b, by name, and PyTorch's, if installed.

    A way writes to `out`, except "by columns", which returns another array.
    """
    columns = np.empty((*out.shape[:-2], out.shape[-1], out.shape[-2]), out.dtype).swapaxes(-1, -2)
    half, rest = a.shape[-1] // 2, np.empty(out.shape, out.dtype)

    def two_parts() -> Any:
        np.matmul(a[..., :half], b[..., :half, :], out=out)
        np.matmul(a[..., half:], b[..., half:, :], out=rest)
        return np.add(out, rest, out=out)

    found: dict[str, Callable[[], Any]] = {
        "as it is": lambda: np.matmul(a, b, out=out),
        "first copied": lambda: np.matmul(np.ascontiguousarray(a), b, out=out),
        "second copied": lambda: np.matmul(a, np.ascontiguousarray(b), out=out),
        "by columns": lambda: np.matmul(a, b, out=columns),
        "two parts": two_parts,
    }
    if has_torch():
        import torch

        torch.set_num_threads(1)
        left, right, result = (torch.from_numpy(x) for x in (a, b, out))
        found["torch"] = lambda: torch.matmul(left, right, out=result)
    return found


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
