"""The parameters of a transformer's parts, kept apart by how a layout divides them.

    column    a matrix whose outputs tensor parallelism divides, with their biases
    row       a matrix whose inputs it divides; each rank has the whole bias
    whole     a matrix, and `vector` a norm or a bias, that every tensor-parallel rank has whole
    experts   matrices that expert parallelism divides, with how many of them a token does not use

A layer is a sum of parts. `products` are the elements of the matrices by which a token is multiplied: half of its
floating-point operations without the scores of attention. `largest` is the largest module (a matrix with its bias).

Proved by: tests/planning/test_architecture.py, tests/planning/test_families.py
"""

from typing import NamedTuple


class Part(NamedTuple):
    """The parameters of a part of a model, and what a token does with them.

    split, replicated, expert: parameters that tensor parallelism divides, that nothing divides, and that expert
    parallelism divides. idle: those of `expert` that a token does not use. products: see the module. largest:
    parameters of the largest module.
    """

    split: int = 0
    replicated: int = 0
    expert: int = 0
    idle: int = 0
    products: int = 0
    largest: int = 0

    @property
    def total(self) -> int:
        """Return all parameters."""
        return self.split + self.replicated + self.expert

    def times(self, count: int) -> "Part":
        """Return this number of equal parts."""
        return Part._make([*(count * number for number in self[:-1]), self.largest])


NOTHING = Part()


def together(*parts: Part) -> Part:
    """Return the sum of parts."""
    *sums, largest = zip(*parts, strict=True)
    return Part._make([*map(sum, sums), max(largest)])


def column(inputs: int, outputs: int, bias: bool = False) -> Part:
    """Return a matrix whose outputs are divided."""
    size = inputs * outputs
    return Part(split=size + bias * outputs, products=size, largest=size + bias * outputs)


def row(inputs: int, outputs: int, bias: bool = False) -> Part:
    """Return a matrix whose inputs are divided; the bias is added once, so each rank has it whole."""
    size = inputs * outputs
    return Part(split=size, replicated=bias * outputs, products=size, largest=size + bias * outputs)


def whole(inputs: int, outputs: int, bias: bool = False) -> Part:
    """Return a matrix that each tensor-parallel rank has whole."""
    size = inputs * outputs
    return Part(replicated=size + bias * outputs, products=size, largest=size + bias * outputs)


def vector(size: int) -> Part:
    """Return parameters that each tensor-parallel rank has whole and that multiply no matrix: norms, biases."""
    return Part(replicated=size, largest=size)


def grouped_query(
    width: int, query: int, kv: int, qkv_bias: bool = False, output_bias: bool = False, value: int | None = None
) -> Part:
    """Return attention with `query` and `kv` elements of a token's queries and keys, of all heads.

    value: elements of a token's output, if they are not as many as the queries'; the values follow the keys.
    """
    output = query if value is None else value
    values = kv if value is None else kv * value // query
    return together(
        column(width, query, qkv_bias),
        column(width, kv, qkv_bias),
        column(width, values, qkv_bias),
        row(output, width, output_bias),
    )


class LatentAttention(NamedTuple):
    """The ranks and head sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    def part(self, width: int, heads: int, bias: bool = False) -> Part:
        """Return the attention; the matrices to latent vectors are small, and every tensor-parallel rank has them."""
        query, rank = heads * (self.nope + self.rope), self.q_rank
        # A latent query has a norm between its two matrices; without one the matrix has no bias.
        queries = [whole(width, rank, bias), vector(rank), column(rank, query)] if rank else [column(width, query)]
        return together(
            *queries,
            whole(width, self.kv_rank + self.rope, bias),
            vector(self.kv_rank),
            column(self.kv_rank, heads * (self.nope + self.value)),
            row(heads * self.value, width, bias),
        )


def mlp(width: int, inner: int, gated: bool = True, bias: bool = False) -> Part:
    """Return an MLP of three matrices if it is gated, and of two if not."""
    into = column(width, inner, bias)
    return together(*[into] * (1 + gated), row(inner, width, bias))


def experts(count: int, used: int, one: Part) -> Part:
    """Return `count` equal experts; a token uses `used` of them."""
    return Part(
        expert=count * one.total, idle=(count - used) * one.total, products=used * one.products, largest=one.largest
    )
