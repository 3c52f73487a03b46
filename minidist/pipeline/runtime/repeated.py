"""The pipeline of a folded dry run: a few of equal micro-batches are computed, and the others repeat what these did.

In its steady state a stage does the same for each micro-batch: it allocates and releases the same bytes, computes for
the same time, and makes the same collective calls. With arrays without data there is nothing else. So what a forward
and a backward do is noted, and when two micro-batches in a row did the same, the next ones repeat it without the
model:

    F of stage 2, noted     computing 1.3 ms    +25 MB activation    all_gather    -201 MB workspace    ...
    F of stage 2, again     the seconds on the clock, the bytes in the account, the calls' messages, and new outputs

The micro-batches of the warm-up, whose forward comes before two backwards are known, are computed, and so are those
whose backward comes after a stage's last one, when sums of gradients are on their way. Messages are always sent.

Proved by: tests/train/test_folded_dry_run.py
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, cast

from minidist.base.flop_counter import FlopCounter
from minidist.base.memory import MemoryAccount
from minidist.base.meta import MetaArray
from minidist.base.watchers import current, watchers
from minidist.comm.sim.folded import FoldedWorld
from minidist.core.base import arrays as xp
from minidist.core.pipeline.plan import Key
from minidist.pipeline.runtime.pipeline import Pipeline

Buffers = dict[int, Any]  # of a `MemoryAccount`


class Given(NamedTuple):
    """An entry of a log: an array of the step's inputs is counted, by its place among what the computation gets."""

    at: int
    purpose: str


class Made(NamedTuple):
    """An array that leaves a stage: the memory that it lies in, its purpose, and whether the backward holds it, too."""

    shape: tuple[int, ...]
    dtype: Any
    memory: tuple[int, ...]
    purpose: str
    held: bool


@dataclass
class Note:
    """What a computation of a stage does.

    shapes: of the arrays that it gets. log: its changes of memory, (purpose, bytes), and its `FoldedWorld.log`, in
    order. left: operations that it has counted and that are not on the clock yet. made: what leaves the stage, by the
    stage that it goes to. loss: of the last stage. again: whether the micro-batch before did the same.
    """

    shapes: list[Any]
    log: list[Any]
    left: list[Any]
    made: dict[int, list[Made]]
    loss: float
    again: bool = field(default=False, compare=False)


class Kept(list[Any]):
    """What a repeated forward keeps for its backward: the arrays that came in, and some of those that went out."""


class RepeatedPipeline(Pipeline):
    """A pipeline on folded ranks; see the module, and `Pipeline`."""

    def begin(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        super().begin(inputs, targets)
        self.world = cast(FoldedWorld, self.comm.world)
        self.account = cast(MemoryAccount, current(MemoryAccount))
        self.counter = cast(FlopCounter, current(FlopCounter))
        self.notes: dict[tuple[str, int], Note] = {}  # of the last micro-batch that was computed
        self.own: dict[Key, Buffers] = {}  # of forwards that were noted: the memory that they got and allocated
        self.steady = self._steady() if {type(one) for one in watchers.get()} == {MemoryAccount, FlopCounter} else set()

    def _steady(self) -> set[Key]:
        """Return the stages and micro-batches whose backward comes before any stage's gradients are complete."""
        backwards = [(step.stage, step.microbatch) for item in self.order for step in item if step.kind == "B"]
        last = {stage: at for at, (stage, _) in enumerate(backwards)}
        return set(backwards[: min(last.values(), default=0)]) - set(self.recomputed)

    def forward(self, stage: int, i: int, arrays: list[Any]) -> None:
        note = self.notes.get(("F", stage))
        if note is None or not self._known(stage) or (stage, i) not in self.steady or note.shapes != _shapes(arrays):
            with self._noting("F", stage, i, arrays):
                super().forward(stage, i, arrays)
            return
        self.losses[i] = note.loss
        held = self._again("F", stage, i, note, arrays)
        self.alive[stage, i] = [], Kept(held if stage == 0 else [*arrays, *held])  # the step keeps its inputs

    def backward(self, stage: int, i: int, arrays: list[Any], weights: str) -> None:
        if not isinstance(self.alive[stage, i][1], Kept):
            with self._noting("B", stage, i, arrays):
                super().backward(stage, i, arrays, weights)
            return
        # The note has the release of what the forward got and made.
        for array in self.alive.pop((stage, i))[1]:
            self.account.forget(xp.owner(array))
        self._again("B", stage, i, self.notes["B", stage], arrays)

    def _known(self, stage: int) -> bool:
        """Return whether two forwards and two backwards in a row did the same."""
        return all((note := self.notes.get((direction, stage))) and note.again for direction in "FB")

    def _again(self, direction: str, stage: int, i: int, note: Note, got: list[Any]) -> list[Any]:
        """Do what a note says, and leave arrays like those that were made; return those that the backward holds.

        got: what the computation gets.
        """
        for entry in note.log:
            if type(entry) is tuple:
                self.account.change(*entry)
            elif type(entry) is Given:
                self.account.track(got[entry.at], entry.purpose)
            else:
                entry.again(self.world)
        self.counter.operations = list(note.left)
        held = []
        for target, made in note.made.items():
            arrays = []
            for one in made:
                memory = MetaArray(one.memory, one.dtype)
                self.account.remember(cast(Any, memory), one.purpose)
                arrays.append(memory.reshape(-1)[: prod(one.shape)].reshape(one.shape))
                held += arrays[-1:] * one.held
            self.messages.enqueue((direction, target, i), arrays)
        return held

    @contextmanager
    def _noting(self, direction: str, stage: int, i: int, arrays: list[Any]) -> Iterator[None]:
        """Note what the block computes, where it can be done again."""
        if self._known(stage) or self.counter.operations or self.account.events is not None:
            yield
            return
        before, shapes = self.account.buffers(), _shapes(arrays)
        log: list[Any] = []
        self.account.events = self.world.log = log
        self.account.recording = True
        try:
            yield
        finally:
            alone, self.world.log = self.world.log is log, None
            self.account.events, self.account.recording = None, False
        made = self._made(direction, stage, i)
        closed = self._closed(direction, stage, i, arrays, before, log)
        previous = self.notes.pop((direction, stage), None)
        if alone and closed and made is not None:
            note = Note(shapes, log, list(self.counter.operations), made, self.losses[i])
            note.again = note == previous
            self.notes[direction, stage] = note

    def _closed(self, direction: str, stage: int, i: int, arrays: list[Any], before: Buffers, log: list[Any]) -> bool:
        """Return whether a computation has released and allocated no other memory than that of its micro-batch.

        before: what was alive before it. A forward releases nothing. A backward releases all that its forward got and
        allocated, and leaves gradients for other stages.
        """
        after = self.account.buffers()
        ended, begun = _only_in(before, after), _only_in(after, before)
        if direction == "F":
            for at, array in enumerate(arrays):
                one = after.get(id(xp.owner(array)))
                if one is not None and stage == 0 and begun.pop(id(one), None):
                    # The step keeps its inputs, so no backward releases them.
                    log[log.index((one.purpose, one.nbytes))] = Given(at, one.purpose)
                elif one is not None:
                    begun[id(one)] = one
            self.own[stage, i] = begun
            return not ended
        own = self.own.pop((stage, i), {})
        left = {id(one) for one in after.values()} & own.keys()
        gradients = self.messages.ready.get(("B", stage - 1, i), ()) if stage else ()
        made = {id(after.get(id(xp.owner(array)))) for array in gradients}
        return bool(own) and ended.keys() <= own.keys() and not left and begun.keys() == made

    def _made(self, direction: str, stage: int, i: int) -> dict[int, list[Made]] | None:
        """Return what a computation left for other stages; None where an array is a part of other memory."""
        outputs = self.alive[stage, i][1] or [] if direction == "F" else []
        held = [xp.owner(tensor.data) for tensor in outputs]
        target = stage + 1 if direction == "F" else stage - 1
        if not 0 <= target < self.plan.stages:
            return {}
        made, counted = list[Made](), self.account.buffers()
        for array in self.messages.ready.get((direction, target, i), ()):
            memory = xp.owner(array)
            buffer = counted.get(id(memory))
            if memory.dtype != array.dtype or buffer is None:
                return None
            is_held = any(one is memory for one in held)
            made.append(Made(array.shape, array.dtype, memory.shape, buffer.purpose, is_held))
        return {target: made}


def _only_in(some: Buffers, others: Buffers) -> Buffers:
    """Return the buffers of one time that are not there at another, by their id."""
    return {id(one): one for key, one in some.items() if others.get(key) is not one}


def _shapes(arrays: Sequence[Any]) -> list[Any]:
    return [(array.shape, array.dtype) for array in arrays]
