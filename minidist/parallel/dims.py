"""The degrees of parallelism: the only place where they are checked, and the communicators that they make.

    ranks = pp x dp x cp x tp, the last axis fastest            rank 5 of 8 with pp 2, dp 2, tp 2

             dp 0        dp 1                                   tp {4, 5}   sends in every layer: neighbours
          tp 0  tp 1  tp 0  tp 1                                dp {5, 7}   once per step
    pp 0     0     1     2     3                                pp {1, 5}   once per micro-batch and stage
    pp 1     4     5     6     7

The axis that sends most has the closest ranks. An expert-parallel rank is a data-parallel rank too (it has rows of its
own), so `ep` divides `dp` and costs no ranks: dp = edp x ep. Names are Megatron's (edp: expert data parallel).

Proved by: tests/parallel/test_dims.py
"""

from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Self

from minidist.base.errors import UsageError
from minidist.comm import Comm
from minidist.comm.mesh import Mesh


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks each kind of parallelism has. Make one with `ParallelDims.of`, which checks."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, ranks: int, *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1, ep: int = 1) -> Self:
        """Return the degrees on `ranks` ranks; dp None: what the others leave.

        Raises UsageError when the product is not `ranks`, naming the missing factor and settings that fit, and when ep
        does not divide dp.
        """
        # The product must be the number of ranks; without dp, it must divide it.
        asked = {
            name: degree for name, degree in (("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)) if degree is not None
        }
        product = prod(asked.values())
        if (ranks != product) if dp is not None else (ranks % product):
            raise UsageError(_mismatch(asked, ranks, product))

        # Experts are split over data-parallel ranks, so ep is a factor of dp and not of the product.
        dp = ranks // product if dp is None else dp
        if dp % ep:
            choices = " or ".join(f"--ep {n}" for n in _neighbours(ep, [n for n in range(1, dp + 1) if dp % n == 0]))
            raise UsageError(
                f"--ep {ep} does not divide --dp {dp}: an expert-parallel rank is a data-parallel rank too; use"
                f" {choices}, or --dp {-(-dp // ep) * ep}"
            )
        return cls(pp, dp, cp, tp, ep)

    @property
    def ranks(self) -> int:
        """The product of the degrees."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Data-parallel ranks that hold the same experts."""
        return self.dp // self.ep

    @property
    def splits_sums(self) -> bool:
        """Whether a sum of one micro-batch is split over ranks, so that its rounding differs from one device's."""
        return self.tp > 1 or self.cp > 1 or self.ep > 1

    def axes(self, comm: Comm) -> "Axes":
        """Return this rank's communicators. Sends nothing; every rank calls it."""
        return Axes(self, comm)


class Axes:
    """This rank's communicator on each axis, and on the two products over which gradients are summed.

    pp, dp, cp, tp, ep, edp: as in `ParallelDims`. data: dp x cp (with context parallelism every rank sees a part of the
    tokens, so each gradient is a summand). expert_data: edp x cp, for the experts, whose own rank has seen the tokens
    of all ep ranks.
    """

    def __init__(self, dims: ParallelDims, comm: Comm) -> None:
        self.dims, self.comm = dims, comm

        # Data parallelism alone needs no mesh, which would be slow to make for 10,000 ranks.
        if dims.dp == comm.size:
            self.dp = self.data = comm
            self.pp = self.cp = self.tp = comm.group([comm.rank], "alone")
        else:
            # The last axis is the fastest: tp ranks are neighbours, pp ranks are the farthest apart.
            mesh = Mesh(comm, (dims.pp, dims.dp, dims.cp, dims.tp), ("pp", "dp", "cp", "tp"))
            self.pp, self.dp, self.cp, self.tp = (mesh[name] for name in mesh.axis_names)
            self.data = mesh["dp", "cp"] if dims.cp > 1 else self.dp

        # Experts: dp is cut into edp x ep, so that ep ranks are the nearest data-parallel ones.
        self.ep, self.expert_data = self.dp.group([self.dp.rank], "ep"), self.data
        if dims.ep > 1:
            mesh = Mesh(self.data, (dims.edp, dims.ep, dims.cp), ("edp", "ep", "cp"))
            self.ep, self.expert_data = mesh["ep"], mesh["edp", "cp"]

    def __getitem__(self, name: str) -> Comm:
        """Return a communicator by name, for `full_tensor` and its kin."""
        return getattr(self, name)  # type: ignore[no-any-return]


def _mismatch(asked: dict[str, int], ranks: int, product: int) -> str:
    """Return one sentence: what was asked for, the missing factor, and the nearest settings that fit."""
    named = {name: degree for name, degree in asked.items() if degree > 1 or (name == "dp" and product == 1)}
    flags = " ".join(f"--{name} {degree}" for name, degree in named.items())
    choices = []

    # Change one degree, and keep the others ...
    for name, degree in named.items():
        others = product // degree
        if ranks % others == 0:
            choices.append(f"use --{name} {ranks // others}")

    # ... or change the number of ranks.
    if "dp" in asked:
        choices[1:] = [f"start {product} ranks"]
    else:
        choices += [f"start {n} ranks" for n in (ranks // product * product, (ranks // product + 1) * product) if n]
    return (
        f"{flags} does not fit {ranks} ranks: the product of the degrees, {product}, must be the number of ranks, and a"
        f" factor of {Fraction(ranks, product)} is missing; {', or '.join(choices[:2])}"
    )


def _neighbours(value: int, valid: list[int]) -> list[int]:
    """Return the nearest valid numbers below and above."""
    return [*[n for n in valid if n < value][-1:], *[n for n in valid if n > value][:1]]
