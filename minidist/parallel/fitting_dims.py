"""The only place where the degrees of parallelism are checked against a number of ranks.

Proved by: tests/parallel/test_dims.py
"""

from minidist.base.errors import UsageError, quoted
from minidist.core.comm import Comm, Mesh
from minidist.core.parallel.dims import ParallelDims


def dims_of(ranks: int, *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1, ep: int = 1) -> ParallelDims:
    """Return the degrees on `ranks` ranks; dp None: what the others leave.

    Raises UsageError when the product is not `ranks`, naming the missing factor and settings that fit, and when ep
    does not divide dp.
    """
    # The product must be the number of ranks; without dp, it must divide it.
    product = pp * cp * tp * (1 if dp is None else dp)
    if (ranks != product) if dp is not None else (ranks % product):
        raise UsageError(_mismatch({"pp": pp, "dp": dp, "cp": cp, "tp": tp}, ranks, product))

    # Experts are split over data-parallel ranks, so ep is a factor of dp and not of the product.
    dp = ranks // product if dp is None else dp
    if dp % ep:
        choices = " or ".join(f"--ep {n}" for n in _neighbours(ep, [n for n in range(1, dp + 1) if dp % n == 0]))
        raise UsageError(
            f"--ep {ep} does not divide --dp {dp}: an expert-parallel rank is a data-parallel rank too; use"
            f" {choices}, or --dp {-(-dp // ep) * ep}"
        )
    return ParallelDims(pp, dp, cp, tp, ep)


def check_layout(layout: ParallelDims, comm: Comm) -> None:
    """Raise UsageError for degrees, or a `ParallelLayout`, that do not fit the ranks of `comm`, or are none."""
    zero = getattr(layout, "zero", 0)
    if zero not in range(4):
        raise UsageError(f"ParallelLayout(zero={quoted(zero)}); the stage of ZeRO is 0, 1, 2 or 3")
    if layout.ranks != comm.size:
        degrees = f"pp={layout.pp}, dp={layout.dp}, cp={layout.cp}, tp={layout.tp}"
        raise UsageError(
            f"ParallelLayout({degrees}) is for {layout.ranks} ranks, and there are {comm.size}; make the product of"
            " the degrees equal to the number of ranks"
        )
    if layout.ep < 1 or layout.dp % layout.ep:
        given = f"dp={layout.dp}, ep={layout.ep}"
        raise UsageError(f"ParallelLayout({given}): ep divides dp; choose a divisor of {layout.dp}")


def splits_sums(dims: ParallelDims) -> bool:
    """Return whether a sum of one micro-batch is split over ranks, so that its rounding differs from one device's."""
    return dims.tp > 1 or dims.cp > 1 or dims.ep > 1


def gradient_axes(mesh: Mesh) -> Comm:
    """Return the communicator over which a gradient is summed: of the axes dp and cp, those that the mesh has."""
    if not isinstance(mesh, Mesh):
        raise UsageError(f"gradient_axes got a value of type {type(mesh).__name__}; pass the mesh of init_device_mesh")
    return mesh[tuple(name for name in mesh.axis_names if name in ("dp", "cp"))]


def _mismatch(asked: dict[str, int | None], ranks: int, product: int) -> str:
    """Return one sentence: what was asked for, the missing factor, and the nearest settings that fit."""
    named = {name: n for name, n in asked.items() if n and (n > 1 or (name == "dp" and product == 1))}
    flags = " ".join(f"--{name} {degree}" for name, degree in named.items())
    choices = []

    # Change one degree, and keep the others ...
    for name, degree in named.items():
        others = product // degree
        if ranks % others == 0:
            choices.append(f"use --{name} {ranks // others}")

    # ... or change the number of ranks.
    if asked["dp"] is not None:
        choices[1:] = [f"start {product} ranks"]
    else:
        choices += [f"start {n} ranks" for n in (ranks // product * product, (ranks // product + 1) * product) if n]
    missing = f", and a factor of {ranks // product} is missing" if ranks % product == 0 else ""
    return (
        f"{flags} does not fit {ranks} ranks: the product of the degrees, {product}, must be the number of"
        f" ranks{missing}; {', or '.join(choices[:2])}"
    )


def _neighbours(value: int, valid: list[int]) -> list[int]:
    """Return the nearest valid numbers below and above."""
    return [*[n for n in valid if n < value][-1:], *[n for n in valid if n > value][:1]]
