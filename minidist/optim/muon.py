"""Muon: momentum whose singular values are all made about 1, for matrices; AdamW for everything else.

A momentum buffer is close to a matrix of low rank: a few directions dominate the step and the others hardly move. Muon
replaces it by the nearest matrix with orthonormal rows or columns, so every direction is stepped by as much. That
matrix is U V^T of the singular value decomposition U S V^T, and a few matrix products find it (`newton_schulz`).

The products need the whole matrix: **Newton-Schulz of a shard is not the shard of Newton-Schulz.** A step therefore has
three passes; the first and the last are element by element, on whatever part of a matrix a rank holds:

    [1] every matrix    buffer = momentum buffer + gradient; update = buffer (Nesterov: gradient + momentum buffer)
    [2] whole matrices  orthogonal = newton_schulz(update)        (`parallel.whole_matrices`, where they are sharded)
    [3] every matrix    p -= lr (0.2 sqrt(max(rows, columns)) orthogonal + decay p)

The factor of [3] gives the update the root mean square of AdamW's, so that one learning rate serves both. State of a
matrix: "momentum_buffer", half of AdamW's. Sources: Jordan et al., "Muon: an optimizer for hidden layers in neural
networks", 2024 (the coefficients; embeddings and the output layer take AdamW); Liu et al., "Muon is scalable for LLM
training", arXiv:2502.16982, section 2.2 (decay and factor).

Proved by: tests/optim/test_muon.py
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from minidist.base.limits import check_flag, check_number
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.optim.adam import AdamW
from minidist.core.optim.optimizer import FlatSlice, State
from minidist.optim.layerwise import is_shard

Shape = tuple[int, ...]
Updates = dict[str, xp.Array]  # parameter -> 1-D, the elements that a rank holds
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan: the largest slope at 0 for which all singular values end in 0.7..1.2


def newton_schulz(matrix: xp.Array, steps: int = 5) -> xp.Array:
    """Return a matrix with the singular vectors of `matrix` and singular values of about 1 (0.7 to 1.2).

    Each step is X <- a X + b (X X^T) X + c (X X^T)^2 X, which maps every singular value by one odd polynomial.
    """
    # The smaller product: X X^T of a wide matrix.
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    a, b, c = COEFFICIENTS

    # The Frobenius norm is at least the largest singular value; all values must begin in 0..1.
    x = x / (math.sqrt(float((x * x).sum())) + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if tall else x


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """Return whether a parameter is a matrix, and neither an embedding nor the output layer of a language model."""
    return len(shape) == 2 and re.search(r"(^|\.)(wte|wpe|embed\w*|\w*embedding\w*|lm_head)\.weight$", name) is None


class Muon(AdamW):
    """Muon for the matrices inside a model (`is_hidden_matrix`), AdamW for the other parameters.

    momentum, nesterov: of the matrices. weight_decay: of both. whole_matrices(updates, shapes): orthogonalises matrices
    whose parts the ranks hold; see `parallel.whole_matrices.WholeMatrices`. adamw: betas and eps of `AdamW`, and groups
    of all parameters. Raises UsageError when a matrix is sharded and there is no `whole_matrices`: each rank would
    orthogonalise its own shard.
    """

    joins = False
    settings = AdamW.settings | {"momentum": partial(check_number, below=1), "nesterov": check_flag}

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        whole_matrices: Callable[[Updates, Mapping[str, Shape]], Updates] | None = None,
        **adamw: Any,
    ) -> None:
        for name in adamw:
            if name not in ("betas", "eps", "groups"):
                raise UsageError(f"Muon has no argument {name!r}; of AdamW's it takes betas, eps and groups")
        super().__init__(parameters, lr, weight_decay=weight_decay, **adamw)
        self.momentum, self.nesterov, self.whole_matrices = momentum, nesterov, whole_matrices

        # The whole shapes of all matrices, also of those that have no element in this rank's shard.
        self.shapes: dict[str, Shape] = {}
        for run in self._runs:
            for parameter in _owners(run.slice):
                layout = getattr(parameter, "layout", None)
                shape = getattr(parameter, "shape", ()) if layout is None else layout.global_shape
                if getattr(parameter, "requires_grad", True) and is_hidden_matrix(parameter.name, shape):
                    self.shapes[parameter.name] = shape
        for run in self._runs:
            if whole_matrices is None and run.pieces[0][0] in self.shapes and is_shard(run.slice):
                raise UsageError(
                    f"Muon orthogonalises the whole of {run.pieces[0][0]!r}, and this rank has a shard of it;"
                    " pass whole_matrices=WholeMatrices(parameters) of minidist.parallel, with tp=comm for tensor"
                    " parallelism"
                )

    def initial_state_of(self, name: str) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if name in self.shapes else self.initial_state()

    def _step_runs(self, runs: list[Any]) -> None:
        # [1] Momentum of this rank's elements; everything but matrices takes AdamW's step at once.
        updates: Updates = {}
        for run in runs:
            name, parts = run.pieces[0][0], [xp.zeros(0, xp.float32)]
            matrix = name in self.shapes
            self._each_block(run, partial(self._accumulate, parts) if matrix else self.update)
            if matrix:
                updates[name] = xp.concatenate(parts[1:] or parts)

        # [2] Whole matrices.
        orthogonal = (self.whole_matrices or orthogonalized)(updates, self.shapes)

        # [3] Decay and step, element by element.
        for run in runs:
            name = run.pieces[0][0]
            if name in updates:
                self._each_block(run, _Step(orthogonal[name], 0.2 * math.sqrt(max(self.shapes[name]))))

    def _accumulate(
        self,
        parts: list[xp.Array],
        data: xp.Array,
        grad: xp.Array,
        state: State,
        work: list[xp.Array],
        lr: float,
        decay: float,
        count: int,
    ) -> None:
        """Take a block of the gradient into the momentum and append the block of the update to `parts`."""
        buffer = state["momentum_buffer"]
        buffer *= self.momentum
        buffer += grad
        parts.append(grad + self.momentum * buffer if self.nesterov else xp.array(buffer))


class _Step:
    """[3] for the blocks of one slice, in their order; values: the slice's part of the orthogonal matrix."""

    def __init__(self, values: xp.Array, factor: float) -> None:
        self.values, self.factor, self.done = values, factor, 0

    def __call__(
        self, data: xp.Array, grad: xp.Array, state: State, work: list[xp.Array], lr: float, decay: float, count: int
    ) -> None:
        block = self.values[self.done : self.done + data.size]
        self.done += data.size
        if decay:
            data *= 1 - lr * decay
        data -= (lr * self.factor) * block


def orthogonalized(updates: Updates, shapes: Mapping[str, Shape]) -> Updates:
    """Return the orthogonalised updates of matrices that this rank has whole."""
    return {name: newton_schulz(update.reshape(shapes[name])).reshape(-1) for name, update in updates.items()}


def _owners(piece: Any) -> Iterable[Any]:
    """Return the parameters of a slice's flat unit, or the parameter (or slice with a shape) itself."""
    if not isinstance(piece, FlatSlice):
        return [piece]
    return getattr(getattr(piece.source, "flat", piece.source), "parameters", ())
