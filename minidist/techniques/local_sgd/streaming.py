"""Streaming DiLoCo: fragments of the weights take turns, and their outer gradients travel while the ranks train on.

DiLoCo sends all weights at once every H steps, and every rank waits for them. Here the parameters are cut into P
fragments. One fragment is synchronised every H / P steps: the peak of the traffic is 1/P. Its outer gradient, the mean
over the ranks of (common weights - own weights), has TAU inner steps to arrive; only then does the outer optimizer step
the common weights, and a rank moves its own ones towards them:

    H = 6, P = 2, TAU = 1     step    1   2   3   4   5   6   7   8   9
                        fragment 0            send ▶ merge            send ▶      own = alpha own + (1-alpha) common
                        fragment 1                        send ▶ merge

With P = 1, TAU = 0 and alpha = 0 it is DiLoCo. The ranks' own weights are never all equal otherwise; the model that is
trained is the common one, which has the same bits on all ranks, and which a checkpoint holds. Where the ranks of a
replica share its weights (ZeRO, FSDP), each has the common weights of its shard.

Source: Douillard et al., Streaming DiLoCo with overlapping communication, arXiv:2501.18512, algorithm 2.
Proved by: tests/techniques/test_streaming_diloco.py
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from minidist.base import arrays as xp
from minidist.base.limits import check_number, check_whole
from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose, track
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, Work
from minidist.optim import OptimizerWrapper
from minidist.techniques.local_sgd.averaging import OUTER, Part, flat_of, parts_of, place_of, trainable

OWN, SENT = "own", "outer_gradient"  # names in the state of a parameter


def fragments_of(offsets: Sequence[int], count: int) -> list[slice]:
    """Return the places of `count` runs of whole parameters of about equal size; a run may be empty.

    offsets: the start of each parameter, and the end of the last one, as in `FlatParameters.offsets`.
    """
    ends, total = offsets[1:], offsets[-1]
    cuts = [0, *(ends[bisect_left(ends, total * i // count)] for i in range(1, count)), total]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def turn_of(fragment: int, fragments: int, every: int) -> int:
    """Return the step, 1 to `every`, after which a fragment is sent for the first time; then every `every` steps."""
    return (fragment + 1) * every // fragments


def streaming_volume(fragments: Sequence[int], every: int, first: int, last: int, ranks: int) -> int:
    """Return the elements that all `ranks` together send in steps first + 1 to `last`, of fragments of these sizes."""
    total = 0
    for i, size in enumerate(fragments):
        turn = turn_of(i, len(fragments), every)
        times = sum(step >= turn and (step - turn) % every == 0 for step in range(first + 1, last + 1))
        total += times * 2 * (ranks - 1) * size
    return total


@dataclass(frozen=True)
class Turns:
    """When fragments of the weights are sent and merged, and how.

    every: inner steps between two synchronisations of a fragment. fragments: their number, at most `every`. delay:
    inner steps that an outer gradient has to arrive, fewer than `every`. mixing: alpha, the share of a rank's own
    weights in the merged ones. parameters: in the order in which they are cut into fragments, where the weights are
    given in another order; ZeRO 3 has those of blocks first.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    parameters: Sequence[Parameter] | None = None

    def check(self, who: str) -> None:
        """Raise UsageError for a number that is out of range."""
        check_whole(f"{who}: every", self.every, 1)
        check_whole(f"{who}: fragments", self.fragments, 1)
        check_whole(f"{who}: delay", self.delay, 0)
        check_number(f"{who}: mixing", self.mixing, least=0)
        if self.fragments > self.every or self.delay >= self.every or self.mixing > 1:
            raise UsageError(
                f"{who}(every={self.every}, fragments={self.fragments}, delay={self.delay}, mixing={self.mixing:g}); it"
                " needs at most `every` fragments, a delay below `every` and a mixing of at most 1"
            )


@dataclass(frozen=True)
class Piece:
    """Elements of a fragment that lie together in `part.data`, at `own`, and in the arrays of the outer step.

    fragment: its number. turn: as `turn_of` says.
    """

    part: Part
    own: slice
    place: slice
    fragment: int
    turn: int


def pieces_of(parts: Sequence[Part], turns: Turns) -> list[Piece]:
    """Return the pieces of all fragments that this rank holds, in the order of the fragments."""
    # The fragment of each parameter, in the order of the whole model.
    given = [p for part in parts for p in flat_of(part).parameters]
    order = list(turns.parameters or given)
    offsets = [0, *accumulate(p.size for p in order)]
    cuts = [place.stop for place in fragments_of(offsets, turns.fragments)]
    fragment_of = {p: bisect_left(cuts, end) for p, end in zip(order, offsets[1:], strict=True)}

    # Parameters of one fragment that lie together are one piece; a shard may have no element of a parameter.
    pieces: list[Piece] = []
    base = 0
    for part in parts:
        for p in flat_of(part).parameters:
            own, number = place_of(part, p), fragment_of[p]
            last = pieces[-1] if pieces else None
            place = slice(base + own.start, base + own.stop)
            if last is not None and (last.part, last.own.stop, last.fragment) == (part, own.start, number):
                both = slice(last.own.start, own.stop), slice(last.place.start, place.stop)
                pieces[-1] = replace(last, own=both[0], place=both[1])
            else:
                pieces.append(Piece(part, own, place, number, turn_of(number, turns.fragments, turns.every)))
        base += part.data.size
    return sorted((piece for piece in pieces if piece.own.stop > piece.own.start), key=lambda piece: piece.fragment)


class StreamingOuterOptimizer(OptimizerWrapper):
    """An inner optimizer of `weights` with outer steps of one fragment at a time, by SGD with Nesterov's momentum.

        turns = Turns(every=100, fragments=4, delay=5)
        optimizer = StreamingOuterOptimizer(AdamW(flat, lr=3e-4), flat, comm, turns)
        ...
        optimizer.step()        # the inner step; then a fragment is sent, or has arrived and is merged
        ...
        optimizer.wait()        # at the end, or before the weights are saved

    weights: as for `PeriodicModelAverager`. lr, momentum: of the outer optimizer. share: this rank's rows over those of
    all ranks; default: all count equally. common: the common weights of what this rank holds, 1-D, part after part.

    All ranks must begin with the same weights. Every `turns.every` steps each rank sends the all-reduce's volume of the
    parameters once, fragment by fragment (purpose `parameter_gather`). Held in addition to the inner state: the common
    weights, the momentum, and the outer gradients on their way.
    """

    def __init__(
        self,
        optimizer: Any,
        weights: Part | Iterable[Part],
        comm: Comm,
        turns: Turns,
        lr: float = 0.7,
        momentum: float = 0.9,
        *,
        algorithm: str = "ring",
        share: float | None = None,
    ) -> None:
        turns.check(f"rank {comm.rank}: StreamingOuterOptimizer")
        self.optimizer, self.parts, self.comm, self.turns = optimizer, parts_of(weights), comm, turns
        self.outer_lr, self.outer_momentum, self.algorithm, self.share = lr, momentum, algorithm, share
        self.pieces = pieces_of(self.parts, turns)
        ends = [0, *accumulate(part.data.size for part in self.parts)]
        self.places = {id(part): slice(*ends) for part, ends in zip(self.parts, pairwise(ends), strict=True)}

        # The common weights, the momentum, and the outer gradients that were sent and not yet merged.
        self.common = track(xp.concatenate([part.data for part in self.parts]), "optimizer")
        self.momentum_buffer = track(xp.zeros_like(self.common), "optimizer")
        self.sent = track(xp.zeros_like(self.common), "optimizer")
        self.works: dict[int, Work] = {}  # of pieces on their way

    @property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each fragment that this rank holds."""
        sizes = [0] * self.turns.fragments
        for piece in self.pieces:
            sizes[piece.fragment] += piece.own.stop - piece.own.start
        return tuple(sizes)

    def common_of(self, part: Part) -> xp.Array:
        """Return the common weights of a part, in the order of `part.data`."""
        return self.common[self.places[id(part)]]

    def step(self) -> None:
        """Make the inner step. Then send the fragment whose turn it is, and merge the one that was sent `delay` ago."""
        self.optimizer.step()
        done = self.optimizer.step_count
        for i, piece in enumerate(self.pieces):
            if self._is_due(done - piece.turn):
                self._send(i)
        for i, piece in enumerate(self.pieces):
            if self._is_due(done - piece.turn - self.turns.delay):
                self._merge(i)

    def wait(self) -> None:
        """Wait for what is on its way. It is merged at its step all the same, by a resumed job too."""
        while self.works:
            self.works.pop(next(iter(self.works))).wait()

    def _is_due(self, since: int) -> bool:
        return since >= 0 and since % self.turns.every == 0

    def _send(self, i: int) -> None:
        """Start the sum of a piece's outer gradients."""
        piece = self.pieces[i]
        outer = self.sent[piece.place]
        outer[...] = self.common[piece.place] - piece.part.data[piece.own]
        if self.share is not None:
            outer *= outer.dtype.type(self.share)
        op = "avg" if self.share is None else "sum"
        equal = f"fragment {piece.fragment} after {flat_of(piece.part).updates}"
        with purpose("parameter_gather"):
            self.works[i] = all_reduce(self.comm, outer, op, algorithm=self.algorithm, async_op=True, equal=equal)

    def _merge(self, i: int) -> None:
        """Step the common weights of a piece, and move this rank's own ones towards them."""
        if i in self.works:
            self.works.pop(i).wait()
        piece, kind, mixing = self.pieces[i], self.common.dtype.type, self.turns.mixing
        outer, common, momentum = self.sent[piece.place], self.common[piece.place], self.momentum_buffer[piece.place]
        own = piece.part.data[piece.own]
        momentum *= kind(self.outer_momentum)
        momentum += outer
        common -= kind(self.outer_lr) * (outer + kind(self.outer_momentum) * momentum)
        own[...] = kind(mixing) * own + kind(1 - mixing) * common
        piece.part.updated()
        # An offloaded optimizer steps copies on the host, which must be the new weights, too.
        self.optimizer.refresh()

    # --- in a checkpoint ---

    def _outer_state(self, part: Part, parameter: Parameter) -> dict[str, xp.Array]:
        """Return views of the outer state of a parameter's elements, by name."""
        here, place = place_of(part, parameter), self.places[id(part)]
        return {OUTER: self.momentum_buffer[place][here], SENT: self.sent[place][here], OWN: part.data[here]}

    @property
    def state(self) -> dict[str, dict[str, xp.Array]]:
        """The state of both optimizers, by parameter, with the rank's own weights. Waits for what is on its way."""
        self.wait()
        result = {name: dict(arrays) for name, arrays in self.optimizer.state.items()}
        for part, p in trainable(self.parts):
            outer = self._outer_state(part, p)
            if outer[OWN].size:
                result.setdefault(p.name, {}).update(outer)
        return result

    def state_names(self, dtype: Any, name: str) -> list[str]:
        """Return the names of the state arrays of parameter `name`."""
        return [*self.optimizer.state_names(dtype, name), OUTER, SENT, OWN]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a `state_dict`, the rank's own weights included; the common ones have been loaded into `common`."""
        outer, state = (OUTER, SENT, OWN), saved["state"]
        inner = {name: {k: a for k, a in arrays.items() if k not in outer} for name, arrays in state.items()}
        inner = {name: arrays for name, arrays in inner.items() if arrays}
        self.optimizer.load_state_dict({**saved, "state": inner})
        for part, p in trainable(self.parts):
            for key, array in self._outer_state(part, p).items():
                if key in state.get(p.name, {}):
                    xp.store(array, state[p.name][key].reshape(-1))
        for part in self.parts:
            part.updated()
