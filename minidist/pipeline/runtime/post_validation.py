"""The optimizer's step without a global barrier: step first, validate while the next step fills the pipeline.

Clipping and the overflow test need the norm over all stages, and to wait for it would make every rank wait for the last
one after each step: zero bubble would not be zero. So the sum of squares travels from stage to stage as each finishes:

    stage 0  ... W W | step | F0 F1 F2  ? I0 ...       a stage steps on what it knows: the sum of the stages before it
    stage 1    ... W W | step | F0 F1  ? I0 ...        ?: before its first backward it learns the whole sum
    stage 2      ... W W | step  ──total──▶ all

Nearly always the step is kept. Otherwise every rank, because all ranks get the same sum, restores the snapshot from
before its step (weights and optimizer state bit for bit, purpose stash), makes the right step or none, and repeats the
forwards that used wrong weights. Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 4; there a
step is undone by the optimizer's inverse, which is not exact.

Proved by: tests/pipeline/test_post_validation.py
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose, track
from minidist.core.comm.communicator import Request
from minidist.core.nn.flat import FlatParameters
from minidist.core.pipeline.plan import Action
from minidist.optim import add_blocks, check_max_norm, clip_coefficient
from minidist.pipeline.runtime.clip import block_sums, places
from minidist.pipeline.runtime.pipeline import Item, Pipeline
from minidist.pipeline.runtime.skips import SkipPipeline


@dataclass(frozen=True)
class StepOutcome:
    """What became of a step, the same on every rank.

    kind: "kept", "amended" (clipped) or "skipped" (a gradient was not finite).
    """

    kind: str
    norm: float
    losses: list[float]


@dataclass
class _Snapshot:
    """A unit before its step: weights, the optimizer's state and its factor of the learning rate."""

    data: Any
    state: dict[str, Any]
    lr_factor: float


class PostValidation:
    """Drives a pipeline's steps and its optimizers. `step` starts a step of training; `finish` ends the last one.

        trainer = PostValidation(Pipeline(comm, plan, stages, loss), lambda flat: Adam(flat), max_norm=1.0)

    make_optimizer(flat): the optimizer of a stage. max_norm: clip by the global norm, as `clip_grad_norm_`
    does it, bit for bit. scaler: a `DynamicLossScaler`, by whose `scale` the loss is multiplied (by the pipeline's
    `loss`): the optimizers divide by it, and a step with a gradient that is not finite is skipped by all ranks.
    outcomes: of all steps but the one under way.

    Sends what the pipeline sends except the metrics; instead, per step, 8 (1 + m) bytes from each stage to the next and
    from the last to every rank: the sum of squares and the losses (purpose clip_norm). Memory: a copy of weights and
    optimizer state (stash).
    """

    def __init__(
        self,
        pipe: Pipeline,
        make_optimizer: Callable[[FlatParameters], Any],
        *,
        max_norm: float | None = None,
        scaler: Any = None,
    ) -> None:
        if pipe.plan.updates != "flush":
            raise UsageError(f"plan {pipe.plan.name!r} has no update to validate; run it with Pipeline alone")
        if isinstance(pipe, SkipPipeline):
            raise UsageError(
                "PostValidation runs forwards again, and a SkipPipeline sends its skips once; use a Pipeline"
            )
        if max_norm is not None:
            check_max_norm(max_norm)
        self.pipe, self.max_norm, self.scaler, self.norms = pipe, max_norm, scaler, pipe.comm.dup()
        self.optimizers = {n: make_optimizer(stage.flat) for n, stage in pipe.stages.items() if len(stage.flat)}
        self.places = places(pipe.plan)
        self.mine = [at for at, (_, rank) in enumerate(self.places) if rank == pipe.comm.rank]
        self.outcomes: list[StepOutcome] = []
        # Of every rank, the item before which it must know whether the last step was right.
        self.starts = [
            next((at for at, item in enumerate(order) if self._needs_outcome(item)), len(order))
            for order in pipe.messages.orders
        ]
        self._pending = False  # is there a step without an outcome?
        self._stepped = False  # was it made?
        self._unscale = 1.0
        self._sums: dict[int, Any] = {}  # stage -> its block sums
        self._before: dict[int, _Snapshot] = {}
        self._sends: list[Request] = []
        self._losses = np.zeros(pipe.plan.microbatches)
        self._total = np.zeros(1 + pipe.plan.microbatches)  # the sum of squares so far, and the losses

    def _needs_outcome(self, item: Sequence[Action]) -> bool:
        """Whether an item is a backward; or the loss, which may be scaled."""
        return any(a.kind in ("B", "I", "W") or (a.kind == "F" and a.stage + 1 == self.pipe.plan.stages) for a in item)

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> list[float]:
        """Run the plan and step. Returns the losses of the step before (none in the first one): these are known now."""
        pipe, start = self.pipe, self.starts[self.pipe.comm.rank]

        # Warm-up, with weights that are not validated yet; again, if they were not right.
        pipe.begin(inputs, targets)
        pipe.execute(pipe.items[:start])
        known = self._validate()
        if known is not None and known.kind != "kept":
            self._discard_forwards()
            pipe.execute([item for item in pipe.items[:start] if not self._is_posted(item)])

        # Steady state and cool-down.
        pipe.zero_grad()
        pipe.execute(pipe.items[start:])
        pipe.sum_gradients()
        self._step_optimistically()
        return known.losses if known is not None else []

    def finish(self) -> list[StepOutcome]:
        """Wait for the outcome of the last step, and return that of each step."""
        self._validate()
        self.norms.waitall(self._sends)
        self._sends = []
        return self.outcomes

    def _discard_forwards(self) -> None:
        """Receive and forget the activations that every rank has sent so far, so that all can run again.

        Every rank has run the items before its `starts`, all of them forwards. Receives that are posted for later
        messages stay posted.
        """
        pipe, messages = self.pipe, self.pipe.messages
        me = pipe.comm.rank
        taken = {(stage, i) for item in pipe.order[: self.starts[me]] for kind, stage, i, _ in item if kind == "F"}
        for rank, order in enumerate(messages.orders):
            for action in (action for item in order[: self.starts[rank]] for action in item):
                stage, i = action.stage + 1, action.microbatch
                if rank == me or action.kind != "SEND_F" or messages.rank_of[stage, i] != me or (stage, i) in taken:
                    continue
                # A message that nothing needs, and that was not taken.
                message = "F", stage, i
                if message not in messages.posted:
                    messages.post(message)
                pipe.comm.waitall(messages.posted.pop(message))
        messages.finish()
        messages.ready.clear()
        pipe.alive.clear()

    def _is_posted(self, item: Item) -> bool:
        """Return whether an item is a receive that stays posted when forwards run again."""
        posted = self.pipe.messages.posted
        return any(kind.startswith("RECV") and (kind[-1], stage, i) in posted for kind, stage, i, _ in item)

    # --- the step ---

    def _step_optimistically(self) -> None:
        """Pass the sum on, take a snapshot, and step unless the stages before this one already exceed the limit."""
        self._unscale = 1.0 if self.scaler is None else 1.0 / self.scaler.scale
        self._losses = self.pipe.losses * self._unscale
        self._sums, self._pending, self._stepped = block_sums(self.pipe), True, False
        self.norms.waitall(self._sends)
        self._sends = []
        so_far = self._pass_on(self.mine[0]) if self.mine else math.nan
        self._before = {
            n: _Snapshot(
                track(xp.array(self.pipe.stages[n].flat.data), "stash"),
                {
                    **optimizer.state_dict(),
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
        """Return what gradients are multiplied by; None when they are not finite."""
        if not math.isfinite(squares):
            return None
        return 1.0 if self.max_norm is None else clip_coefficient(math.sqrt(squares) * self._unscale, self.max_norm)

    def _pass_on(self, at: int) -> float:
        """Add the blocks of place `at`, one after the other, to the sum of the places before it, and send it on."""
        rank, size = self.pipe.comm.rank, self.pipe.comm.size
        values = np.zeros(1 + self.pipe.plan.microbatches)
        with purpose("clip_norm"):
            if at and self.places[at - 1][1] != rank:
                self.norms.recv(values, self.places[at - 1][1], 0)
            elif at:
                values[:] = self._total
            if at == self.mine[0]:
                values[1:] += self._losses
            values[0] = total = add_blocks(self._sums[self.places[at][0]], float(values[0]))
            self._total = values

            # To the next place; from the last one to every other rank, which waits for it.
            following = self.places[at + 1][1] if at + 1 < len(self.places) else None
            if following is None:
                self._sends += [self.norms.isend(values, other, 1) for other in range(size) if other != rank]
            elif following != rank:
                self._sends.append(self.norms.isend(values, following, 0))
        return total

    # --- the outcome ---

    def _validate(self) -> StepOutcome | None:
        """Learn the whole sum and make the step right; None when there is nothing to validate."""
        if not self._pending:
            return None
        self._pending = False
        for at in self.mine[1:]:
            self._pass_on(at)
        values = np.empty(1 + self.pipe.plan.microbatches)
        if self.places[-1][1] == self.pipe.comm.rank:
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
        kind = "skipped" if coefficient is None else "kept" if coefficient == 1.0 else "amended"
        norm = math.sqrt(values[0]) * self._unscale if values[0] >= 0 else math.nan
        self.outcomes.append(StepOutcome(kind, norm, values[1:].tolist()))
        self._before = {}
        return self.outcomes[-1]

    def _amend(self, coefficient: float | None) -> None:
        """Restore the snapshot; then make the clipped step, or none."""
        for n, optimizer in self.optimizers.items():
            flat, before = self.pipe.stages[n].flat, self._before[n]
            if self._stepped:
                xp.copyto(flat.data, before.data)
                optimizer.load_state_dict(before.state)
                flat.updated()
            if coefficient is not None:
                optimizer.grad_scale = self._unscale * coefficient
                now, optimizer.lr_factor = optimizer.lr_factor, before.lr_factor
                optimizer.step()
                optimizer.lr_factor = now
