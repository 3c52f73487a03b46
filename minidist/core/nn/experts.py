"""A mixture of experts: each token uses one or two of several MLPs, so parameters grow without more work per token.

    tokens ──▶ router: softmax(x W) ──▶ each token's expert(s) and gate(s)
    tokens ──▶ slots (experts, capacity, D) ──▶ expert MLPs ──▶ back to the tokens, times their gates

An expert has `capacity` slots for a group of tokens, assigned in token order (with two choices: all first choices
before all second ones). A token without a slot is *dropped*: the layer adds nothing to it. A *group* is the input of
one call, one rank's micro-batch; capacity and auxiliary loss belong to the group, also on a single device.

top_k=1 is Switch (Fedus et al., "Switch Transformers", 2021): the gate is the probability, and the auxiliary loss
N sum_e f_e P_e. top_k=2 is GShard (Lepikhin et al., 2020): the two gates are divided by their sum, the auxiliary loss
is (1/E) sum_e (c_e / S) m_e, and the second expert is always used (their random dropping of it is left out). f_e = c_e
/ S is the share of first choices, P_e = m_e the mean probability; the gradient flows through the latter alone.

Proved by: tests/parallel/test_expert.py, tests/nn/test_llama.py
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any, ClassVar

from minidist.core.autograd import Parameter, Tensor, gelu, linear, record, reshape, softmax
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.nn.module import Identity, Module


def expert_capacity(tokens: int, experts: int, top_k: int, factor: float) -> int:
    """Return the slots of an expert for a group: top_k tokens / experts x factor, rounded up, at least 1."""
    hooks.refusals().check_capacity(tokens, experts, top_k, factor)
    return max(1, ceil(top_k * tokens / experts * factor))


class Assignment:
    """The experts and slots of a group's tokens, from the router's probabilities (n, experts).

    choices: for each of the top_k choices (experts (n,), slots (n,)); slot -1 says that the token is dropped.
    tokens: for each choice the token at each slot, -1 where this choice has put none.
    """

    def __init__(self, probabilities: xp.Array, top_k: int, capacity: int) -> None:
        n, experts = probabilities.shape
        rest, rows = xp.array(probabilities), xp.device_arange(n)
        counts = [xp.zeros(experts, xp.int64, probabilities)]  # tokens of each expert after each choice
        self.choices, self.tokens = [], []
        for _ in range(top_k):
            # Each token's best expert that it has not chosen yet.
            expert = rest.argmax(axis=1)
            rest[rows, expert] = -1.0
            mine = xp.zeros((n, experts), xp.int64, probabilities)
            mine[rows, expert] = 1

            # Its place among the tokens with the same expert, behind those of the choice before.
            place = (mine.cumsum(axis=0) - 1)[rows, expert] + counts[-1][expert]
            slots = xp.where(place < capacity, expert * capacity + place, -1)
            counts.append(counts[-1] + mine.sum(axis=0))

            # The inverse: which token is at a slot.
            tokens = xp.full(experts * capacity, -1, xp.int64, slots)
            tokens[slots[slots >= 0]] = rows[slots >= 0]
            self.choices.append((expert, slots))
            self.tokens.append(tokens)
        self.first_counts = counts[1]

    @property
    def dropped(self) -> int:
        """How many choices are without a slot."""
        return sum(int((slots < 0).sum()) for _, slots in self.choices)


def _rows(x: xp.Array, index: xp.Array) -> xp.Array:
    """x[index], with zeros where the index is -1."""
    result = x[index]
    result[index < 0] = 0
    return result


def take_rows(name: str, x: Tensor, there: xp.Array, back: Sequence[xp.Array]) -> Tensor:
    """x (n, D) -> (len(there), D): the row of x that each entry of `there` names, zeros where it is -1.

    back: for each row of x its row in the result, or -1; several such arrays where a row of x is there several times.
    """
    edge = x, lambda g: functools.reduce(operator.iadd, [_rows(g, index) for index in back])
    return record(name, _rows(x.data, there), (edge,), cost=0)


class MixtureOfExperts(Module):
    """x (batch, T, width) -> the same shape, zeros for dropped tokens. Each parameter has the weights of all experts.

    After a call, `auxiliary_loss` is the group's, a tensor of shape () not yet weighted, and `assignment` says which
    expert and slot each token got. Four submodules that do nothing on one device are the places for parallelism:
    `dispatch` and `combine` take the slots (experts, capacity, width) to the experts' ranks and back (expert
    parallelism), `f` and `g` are the borders of the region in which each expert's inner width is split (tensor
    parallelism). expert_dims: the experts' parameters by name, each with the dim of the inner width, or None.
    """

    expert_dims: ClassVar[dict[str, int | None]] = {"fc_weight": 2, "fc_bias": 2, "proj_weight": 1, "proj_bias": None}

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int = 1,
        capacity_factor: float = 1.25,
        dtype: Any = xp.float32,
        scale: float = 0.02,
        seed: int | None = 0,
    ) -> None:
        for name, size in (("width", width), ("hidden", hidden), ("experts", experts)):
            hooks.check_whole(name, size, 1)
        hooks.refusals().check_experts(experts, top_k, capacity_factor)
        self.num_experts, self.top_k, self.capacity_factor = experts, top_k, capacity_factor

        def weight(*shape: int, scale: float = scale) -> Parameter:
            return Parameter(xp.zeros(shape, dtype), init=("normal", scale) if scale else ("constant", 0.0))

        # All experts' weights lie in one parameter, so that a batched product computes them all.
        self.router = weight(experts, width)
        self.make_experts(weight, experts, width, hidden)

        # Places where a parallel style puts its communication.
        self.dispatch: Module = Identity()
        self.combine: Module = Identity()
        self.f: Module = Identity()
        self.g: Module = Identity()
        self.auxiliary_loss: Tensor | None = None
        self.assignment: Assignment | None = None
        self.initialize(seed)

    def make_experts(self, weight: Callable[..., Parameter], experts: int, width: int, hidden: int) -> None:
        """Make the experts' parameters with `weight(*shape, scale=)`."""
        self.fc_weight, self.fc_bias = weight(experts, width, hidden), weight(experts, 1, hidden, scale=0.0)
        self.proj_weight, self.proj_bias = weight(experts, hidden, width), weight(experts, 1, width, scale=0.0)

    def compute(self, work: Tensor) -> Tensor:
        """(experts, capacity, width) -> the same shape: one batched product per layer, for all experts."""
        hidden = gelu(self.f(work) @ self.fc_weight + self.fc_bias)
        return self.g(hidden @ self.proj_weight) + self.proj_bias

    def forward(self, x: Tensor) -> Tensor:
        shape, experts = x.shape, self.num_experts

        # All tokens of the call are one group, (n, width). The router chooses experts and slots.
        x = reshape(x, (-1, shape[-1]))
        n = x.shape[0]
        probabilities = softmax(linear(x, self.router))
        capacity = expert_capacity(n, experts, self.top_k, self.capacity_factor)
        self.assignment = assignment = Assignment(probabilities.data, self.top_k, capacity)
        self.auxiliary_loss = self._auxiliary_loss(probabilities, assignment.first_counts)

        # Tokens to slots, slots to their experts' ranks, two products per expert, and the way back.
        at_slots = functools.reduce(xp.maximum, assignment.tokens)
        slots = take_rows("to_slots", x, at_slots, [slot for _, slot in assignment.choices])
        work = self.dispatch(reshape(slots, (experts, capacity, shape[-1])))
        done = reshape(self.combine(self.compute(work)), (experts * capacity, shape[-1]))

        # Each token gets its slots' rows times its gates; GShard's two gates are divided by their sum.
        rows = xp.device_arange(n)
        gates = [probabilities[rows, expert] for expert, _ in assignment.choices]
        if self.top_k == 2:
            total = gates[0] + gates[1]
            gates = [gate / total for gate in gates]
        parts = [
            take_rows("from_slots", done, slot, [tokens]) * reshape(gate, (n, 1))
            for gate, (_, slot), tokens in zip(gates, assignment.choices, assignment.tokens, strict=True)
        ]
        return reshape(functools.reduce(operator.add, parts), shape)

    def _auxiliary_loss(self, probabilities: Tensor, first_counts: xp.Array) -> Tensor:
        """Switch: N sum_e f_e P_e. GShard: (1/E) sum_e (c_e / S) m_e. Shape ()."""
        (n, experts), dtype = probabilities.shape, probabilities.dtype
        # The share of first choices is a constant; the gradient flows through the mean probability.
        kind = xp.float32 if xp.is_half(dtype) else dtype  # n may be too large for two bytes
        share = Tensor(xp.downcast(xp.as_array(first_counts, kind) / xp.as_array(n, kind), dtype))
        both = (probabilities.mean(0) * share).sum()
        return both * experts if self.top_k == 1 else both / experts


def auxiliary_losses(blocks: Iterable[Any], before: Tensor | None = None) -> Tensor:
    """Return the sum of the blocks' auxiliary losses, shape (1,), added to that of the blocks `before`."""
    for block in blocks:
        hooks.refusals().check_auxiliary(block.mlp, block.mlp.auxiliary_loss)
        auxiliary = reshape(block.mlp.auxiliary_loss, (1,))
        before = auxiliary if before is None else before + auxiliary
    assert before is not None
    return before
