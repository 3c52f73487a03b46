"""The optimizer's step without a global barrier: step first, validate while the next step fills the pipeline.

Clipping and the overflow test need the norm over *all* stages, and to wait for it would make every rank wait for the
last one
after each step: zero bubble would not be zero. So the sum of squares travels from stage to stage as each one finishes:

    stage 0  ... W W | step | F0 F1 F2  ? I0 ...          a stage steps on what it knows: the sum of the stages before it
    stage 1    ... W W | step | F0 F1  ? I0 ...           ?: before its first backward it has the verdict on the whole sum
    stage 2      ... W W | step  ──total──▶ all

Nearly always the verdict is "kept". Otherwise every rank, for all get the same sum, takes back its step (a copy of
weights and
optimizer state from before it, purpose stash: the very bits), makes the right one or none, and runs the forwards that
saw wrong weights again. Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 4; there the way back
is the optimizer's inverse, which is not exact.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.memory import track
from minidist.base.trace import purpose
from minidist.comm import Comm
from minidist.comm.point_to_point import Request
from minidist.nn.flat import FlatParameters
from minidist.optim import add_blocks, clip_coefficient
from minidist.pipeline.plan import Action, Plan
from minidist.pipeline.runtime.norm import block_sums, places
from minidist.pipeline.runtime.pipeline import Loss, Pipeline
from minidist.pipeline.runtime.stages import PipelineStage


@dataclass(frozen=True)
class Verdict:
    """What became of a step, the same on every rank: "kept", "amended" (clipped) or "skipped" (a gradient was not
    finite).
    """

    outcome: str
    norm: float
    losses: list[float]


@dataclass
class _Before:
    """A unit before its step: weights, the optimizer's state and its factor of the learning rate."""

    data: Any
    state: dict[str, Any]
    lr_factor: float


class PostValidatedPipeline(Pipeline):
    """A pipeline that also makes the optimizer's step. `step` starts a step of training; `finish` ends the last one.

    make_optimizer(flat): the optimizer of a stage. max_norm: clip by the global norm, as `Pipeline.clip_grad_norm_`
    does it, bit for bit. scaler: a `DynamicLossScaler`, by whose `scale` the loss is multiplied (by `loss`): the
    optimizers divide by it, and a step with a gradient that is not finite is skipped by all ranks. verdicts: of all
    steps but the one under way.

    Sends what a `Pipeline` sends except the metrics; instead, per step, 8 (1 + m) bytes from each stage to the next and
    from the last
    to every rank: the sum of squares and the losses (purpose clip_norm). Memory: a copy of weights and optimizer state
    (stash).
    """

    UPDATES = ("flush",)

    def __init__(
        self,
        comm: Comm,
        plan: Plan,
        stages: Sequence[PipelineStage],
        loss: Loss,
        make_optimizer: Callable[[FlatParameters], Any],
        *,
        max_norm: float | None = None,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(comm, plan, stages, loss, **options)
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm is {max_norm}; it must be above 0, or None for no clipping")
        self.max_norm, self.scaler, self.norms = max_norm, scaler, comm.dup()
        self.optimizers = {n: make_optimizer(stage.flat) for n, stage in self.stages.items() if len(stage.flat)}
        self.places = places(self)
        self.mine = [at for at, (_, rank) in enumerate(self.places) if rank == comm.rank]
        self.verdicts: list[Verdict] = []
        orders = self.messages.orders
        self.starts = [
            next((at for at, item in enumerate(order) if self._needs_verdict(item)), len(order)) for order in orders
        ]
        self._pending = False  # is there a step without a verdict?
        self._sends: list[Request] = []
        self._total = np.zeros(1 + plan.microbatches)  # the sum of squares so far, and the losses

    def _needs_verdict(self, item: Sequence[Any]) -> bool:
        """Before a rank's first backward; and before the loss, which may be scaled."""
        return any(a.kind in ("B", "I", "W") or (a.kind == "F" and a.stage + 1 == self.plan.stages) for a in item)

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the plan and step. Returns the losses of the step before (none in the first one): these are known now."""
        start = self.starts[self.comm.rank]
        self._enter(inputs, targets)
        self._run_items(0, start)
        known = self._validate()
        if known is not None and known.outcome != "kept":
            self._take_back_messages()
            self._run_items(0, start)
        self.zero_grad()
        self._run_items(start, len(self.order))
        self._sum_gradients()
        self._step_optimistically()
        return known.losses if known is not None else []

    def finish(self) -> list[Verdict]:
        """Wait for the verdict on the last step; what became of each step."""
        self._validate()
        self.comm.waitall(self._sends)
        self._sends = []
        return self.verdicts

    # --- the step ---

    def _step_optimistically(self) -> None:
        self._unscale = 1.0 if self.scaler is None else 1.0 / self.scaler.scale
        self.losses *= self._unscale
        self._sums, self._pending, self._stepped = block_sums(self), True, False
        self.comm.waitall(self._sends)
        self._sends = []
        so_far = self._pass_on(self.mine[0]) if self.mine else math.nan
        self._before = {
            n: _Before(
                track(xp.array(self.stages[n].flat.data), "stash"),
                {
                    "step": optimizer.step_count,
                    "state": {
                        name: {key: track(xp.array(array), "stash") for key, array in row.items()}
                        for name, row in optimizer.state.items()
                    },
                },
                optimizer.lr_factor,
            )
            for n, optimizer in self.optimizers.items()
        }
        if self._coefficient(so_far) == 1.0:
            self._stepped = True
            for optimizer in self.optimizers.values():
                optimizer.grad_scale = self._unscale
                optimizer.step()

    def _coefficient(self, squares: float) -> float | None:
        """What gradients are multiplied by; None when they are not finite."""
        if not math.isfinite(squares):
            return None
        return 1.0 if self.max_norm is None else clip_coefficient(math.sqrt(squares) * self._unscale, self.max_norm)

    def _pass_on(self, at: int) -> float:
        """Place `at` adds its blocks, one after the other, to the sum of the places before it and sends it on."""
        values = np.zeros(1 + self.plan.microbatches)
        with purpose("clip_norm"):
            if at and self.places[at - 1][1] != self.comm.rank:
                self.norms.recv(values, self.places[at - 1][1], 0)
            elif at:
                values[:] = self._total
            if at == self.mine[0]:
                values[1:] += self.losses
            values[0] = total = add_blocks(self._sums[self.places[at][0]], float(values[0]))
            self._total = values
            following = self.places[at + 1][1] if at + 1 < len(self.places) else None
            if following is None:  # the last place: everybody else waits for this
                self._sends += [
                    self.norms.isend(values, rank, 1) for rank in range(self.comm.size) if rank != self.comm.rank
                ]
            elif following != self.comm.rank:
                self._sends.append(self.norms.isend(values, following, 0))
        return total

    # --- the verdict ---

    def _validate(self) -> Verdict | None:
        """Learn the whole sum and make the step right; None when there is nothing to validate."""
        if not self._pending:
            return None
        self._pending = False
        for at in self.mine[1:]:
            self._pass_on(at)
        values = np.empty(1 + self.plan.microbatches)
        if self.places[-1][1] == self.comm.rank:
            values[:] = self._total
        else:
            with purpose("clip_norm"):
                self.norms.recv(values, self.places[-1][1], 1)
        coefficient = self._coefficient(float(values[0]))
        if self.scaler is not None:
            self.scaler.update(coefficient is None)
        if coefficient != 1.0:
            self._amend(coefficient)
        elif not self._stepped:
            raise AssertionError("a sum of squares cannot fall")
        outcome = "skipped" if coefficient is None else "kept" if coefficient == 1.0 else "amended"
        self.verdicts.append(
            Verdict(outcome, math.sqrt(values[0]) * self._unscale if values[0] >= 0 else math.nan, values[1:].tolist())
        )
        self._before = {}
        return self.verdicts[-1]

    def _amend(self, coefficient: float | None) -> None:
        """Back to before the step; then the clipped step, or none."""
        for n, optimizer in self.optimizers.items():
            flat, before = self.stages[n].flat, self._before[n]
            if self._stepped:
                xp.copyto(flat.data, before.data)
                optimizer.load_state_dict(before.state)
                flat.updated()
            if coefficient is not None:
                optimizer.grad_scale = self._unscale * coefficient
                now, optimizer.lr_factor = optimizer.lr_factor, before.lr_factor
                optimizer.step()
                optimizer.lr_factor = now

    def _take_back_messages(self) -> None:
        """Receive and forget what was sent from wrong weights, so that the forwards can run again; keep the receives
        that are posted.
        """
        messages, me = self.messages, self.comm.rank
        for rank, order in enumerate(messages.orders):
            if rank != me:
                for action in (action for item in order[: self.starts[rank]] for action in item):
                    stage, i = action.stage, action.microbatch
                    if action.kind == "SEND_F" and messages.home[stage + 1, i] == me:
                        messages.drop("F", stage, stage + 1, i)
        for stage, i in messages.borders.into:
            for source in messages.borders.into[stage, i]:
                sender = messages.home.get((source, i), me)
                if stage > source + 1 and sender != me and self._has_run(sender, source, i):
                    messages.drop("F", source, stage, i)
        messages.finish()
        messages.ready.clear()
        self.alive.clear()

    def _has_run(self, rank: int, stage: int, i: int) -> bool:
        return any(
            a == Action.of("F", stage, i) for item in self.messages.orders[rank][: self.starts[rank]] for a in item
        )
