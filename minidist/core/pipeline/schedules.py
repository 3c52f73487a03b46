"""The schedules, from GPipe to zero bubble, by name: `get_schedule("1f1b").plan(4, 8)`.

    @schedule("my-schedule")
    def my_schedule(p, m): ...      returns for each of the p ranks the list of its actions on m micro-batches

A function that takes it gets `v`, chunks per rank; further keyword arguments are options. The pictures are for p = 4
ranks or fewer, and m = 4 micro-batches.

Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream-2BW, ICML 2021; Narayanan et al., Megatron-LM,
SC 2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from minidist.core.base import hooks
from minidist.core.base.registry import Registry
from minidist.core.pipeline.plan import B, F, I, Orders, Plan, W, every


@dataclass(frozen=True)
class Schedule:
    """A schedule by name.

    chunks: stages per rank, or None when the caller chooses (default 2). updates: see Plan.
    """

    name: str
    function: Callable[..., Orders]
    chunks: int | None = 1
    updates: str = "flush"

    def plan(self, stages: int, microbatches: int, chunks: int | None = None, **options: Any) -> Plan:
        """Return the plan for `stages` pipeline ranks with `chunks` stages each; UsageError where there is none."""
        hooks.check_schedule(self, stages, microbatches, chunks, options)
        v = self.chunks or chunks or 2
        arguments: dict[str, Any] = {"p": stages, "m": microbatches}
        if "v" in inspect.signature(self.function).parameters:
            arguments["v"] = v
        return Plan(self.name, self.function(**arguments, **options), stages * v, microbatches, self.updates)


SCHEDULES: Registry[Schedule] = Registry("schedule")


def schedule(
    name: str, *, aliases: tuple[str, ...] = (), **attributes: Any
) -> Callable[[Callable[..., Orders]], Callable[..., Orders]]:
    """Register a function as the schedule `name`. attributes: those of `Schedule`."""

    def register(function: Callable[..., Orders]) -> Callable[..., Orders]:
        SCHEDULES.add(name, Schedule(name, function, **attributes), aliases)
        return function

    return register


def get_schedule(name: str) -> Schedule:
    """Return the schedule of that name or alias (in any case); UsageError with the nearest name."""
    return SCHEDULES[str(name)]


@schedule("gpipe")
def gpipe(p: int, m: int, backward_order: str = "reversed") -> Orders:
    """Return GPipe: all forwards, then all backwards; while one micro-batch is on stage 1, the next is on stage 0.

        rank 0   F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0
        rank 1   .. F0 F1 F2 F3 .. .. B3 B2 B1 B0
        rank 2   .. .. F0 F1 F2 F3 B3 B2 B1 B0

    Idle (p-1)(T_F + T_B); all m micro-batches are alive at once, so the paper recomputes activations. backward_order:
    "reversed" (m-1..0, the paper's) or "forward" (0..m-1, that of several libraries).
    """
    step = -1 if backward_order == "reversed" else 1
    # Warm-up: all forwards. Cool-down: all backwards. There is no steady state.
    return [[*every(F(s, 0), m), *every(B(s, 0), m)[::step]] for s in range(p)]


@schedule("1f1b")
def one_f_one_b(p: int, m: int) -> Orders:
    """Return 1F1B (PipeDream-Flush): a stage runs each backward as early as it can, which frees the oldest activations.

        rank 0   F0 F1|F2 .. .. B0 F3 B1|.. B2 .. B3     [1] warm-up: p-1-s forwards
        rank 1   .. F0|F1 .. B0 F2 B1 F3 B2|.. B3        [2] steady state: one F, one B
        rank 2   .. ..|F0 B0 F1 B1 F2 B2 F3 B3|          [3] cool-down: the backwards that are left

    Idle as GPipe's, (p-1)(T_F + T_B), but only min(m, p-s) micro-batches are alive on stage s. For any m, also fewer
    than p. Megatron-LM's default.
    """
    return [stage_order(s, m, min(m, p - 1 - s)) for s in range(p)]


def stage_order(s: int, m: int, warm_up: int) -> list[int]:
    """Return a stage's order: `warm_up` forwards, then F and B in turn, then the backwards that are left."""
    forwards, backwards = every(F(s, 0), m), every(B(s, 0), m)
    # [1] Warm-up: fill the stages behind this one, until the first gradient comes back.
    order = list(forwards[:warm_up])
    # [2] Steady state: as many micro-batches begin as end; the zip ends with the forwards.
    order += chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    # [3] Cool-down.
    return order + list(backwards[m - warm_up :])


@schedule("interleaved", chunks=None)
def interleaved(p: int, m: int, v: int, group: int = 0) -> Orders:
    """Return interleaved 1F1B: a rank holds v short stages instead of a long one, so filling the pipeline takes 1/v of
    the time.

        model      | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |        p = 4, v = 2: stage of chunk c on rank r is c*p + r
        rank         0   1   2   3   0   1   2   3

    Micro-batches go in groups: a group through chunk 0, then through chunk 1, ...; backward the same with the chunks
    reversed. Idle (p-1)(T_F + T_B)/v against the rank's own time for a whole pass, traffic x v, and more activations
    alive. group: micro-batches g of a group, Megatron-LM's microbatch_group_size_per_vp_stage; the last one has the
    remaining ones. 0: m / max(1, m // p) as in PyTorch, which is p where p divides m.
    """
    g = group or m // max(1, m // p)
    # (chunk, micro-batch) in the order of a rank's forwards: a group of g micro-batches through each chunk.
    table = [(c, i) for first in range(0, m, g) for c in range(v) for i in range(first, min(first + g, m))]
    orders = []
    for r in range(p):
        forwards = [F(c * p + r, i) for c, i in table]
        backwards = [B((v - 1 - c) * p + r, i) for c, i in table]
        w = min(m * v, (v - 1) * g + 2 * (p - 1 - r))
        # Warm-up, steady state (one F, one B) and cool-down: 1F1B's phases over the table of chunks.
        steady = chain.from_iterable(zip(forwards[w:], backwards, strict=False))
        orders.append([*forwards[:w], *steady, *backwards[m * v - w :]])
    return orders


def zero_bubble(p: int, m: int, k: int) -> Orders:
    """Return a schedule in which no rank waits for a weight gradient: these fill the time in which a stage would wait.

    1F1B's backward is two computations: I, the input gradient, which the stage before needs at once; and W, the weight
    gradient, which only the optimizer needs. Split them, run I first, and run W in the idle time:

        rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 .. I2 W2 .. I3 W3      k = 1: memory of 1F1B, idle (p-1)(T_F + T_I - T_W)
        rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3            stage s is k*s weight gradients behind

    With k = 2 there are 2(p-1-s) forwards before the first backward: idle (p-1)(T_F + T_I - 2 T_W) in a rank's own
    window, for 2p-1 micro-batches alive. "Own window" because ranks start and end at different times: the next step
    must begin without a global barrier.
    """
    return [_split_order(s, m, min(m, k * (p - 1 - s)), k * s) for s in range(p)]


def _split_order(s: int, m: int, warm_up: int, lag: int) -> list[int]:
    forwards, weights = every(F(s, 0), m), every(W(s, 0), m)
    # Warm-up: k times as many forwards ahead as 1F1B.
    order = list(forwards[:warm_up])
    # Steady state: a forward, an input gradient, and the weight gradient of `lag` micro-batches ago.
    for b in range(m):
        if warm_up + b < m:
            order.append(forwards[warm_up + b])
        order.append(I(s, b))
        if b >= lag:
            order.append(weights[b - lag])
    # Cool-down: the weight gradients that were put off.
    return order + list(weights[max(0, m - lag) :])


@schedule("zb-h1")
def zb_h1(p: int, m: int) -> Orders:
    """Return ZB-H1: weight gradients fill the time in which a stage would wait; p micro-batches are alive until W."""
    return zero_bubble(p, m, 1)


@schedule("zb-h2")
def zb_h2(p: int, m: int) -> Orders:
    """Return ZB-H2: no rank waits between its first F and its last W; up to 2p-1 micro-batches are alive."""
    return zero_bubble(p, m, 2)
