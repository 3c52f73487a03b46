"""Streaming DiLoCo: fragments of the weights take turns, and their outer gradients travel while the ranks train on.

DiLoCo sends all weights at once every H steps, and every rank waits for them. Here the parameters are cut into P
fragments, of which one is synchronised every H / P steps: the peak of the traffic is 1/P. Its outer gradient, the mean
over the ranks of (common weights - own weights), has TAU inner steps to arrive; only then does the outer optimizer step
the common weights, and a rank moves its own ones towards them:

    H = 6, P = 2, TAU = 1     step    1   2   3   4   5   6   7   8   9
                        fragment 0            send ▶ merge            send ▶      own = alpha own + (1-alpha) common
                        fragment 1                        send ▶ merge

With P = 1, TAU = 0 and alpha = 0 it is DiLoCo. The ranks' own weights are never all equal otherwise; the model that is
trained is the common one, which has the same bits on all ranks, and which a checkpoint holds.

Source: Douillard et al., Streaming DiLoCo with overlapping communication, arXiv:2501.18512, algorithm 2.
Proved by: tests/techniques/test_streaming_diloco.py
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minidist.base import arrays as xp
from minidist.base.limits import check_number, check_whole
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.base.watchers import track
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, Work
from minidist.core.nn.flat import FlatParameters
from minidist.optim import OptimizerWrapper
from minidist.techniques.local_sgd.averaging import OUTER, local_sgd_volume

OWN, SENT = "own", "outer_gradient"  # names in the state of a parameter


def fragments_of(flat: FlatParameters, count: int) -> list[slice]:
    """Return the places of `count` runs of whole parameters of about equal size; a run may be empty."""
    ends = flat.offsets[1:]
    cuts = [0, *(ends[bisect_left(ends, flat.numel * i // count)] for i in range(1, count)), flat.numel]
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
        total += times * local_sgd_volume(size, ranks)["parameter_gather"]
    return total


class StreamingOuterOptimizer(OptimizerWrapper):
    """An inner optimizer of `flat` with outer steps of one fragment at a time, by SGD with Nesterov's momentum.

        optimizer = StreamingOuterOptimizer(AdamW(flat, lr=3e-4), flat, comm, every=100, fragments=4, delay=5)
        ...
        optimizer.step()        # the inner step; then a fragment is sent, or has arrived and is merged
        ...
        optimizer.wait()        # at the end, or before the weights are saved

    every: inner steps between two synchronisations of a fragment. delay: inner steps that its outer gradient has to
    arrive, fewer than `every`. mixing: alpha, the share of a rank's own weights in the merged ones. lr, momentum: of
    the outer optimizer. share: this rank's rows over those of all ranks; default: all ranks count alike.

    All ranks must begin with the same weights. Every `every` steps each rank sends the all-reduce's volume of the
    parameters once, fragment by fragment (purpose `parameter_gather`). Held beside the inner state: the common weights,
    the momentum, and the outer gradients on their way.
    """

    def __init__(
        self,
        optimizer: Any,
        flat: FlatParameters,
        comm: Comm,
        every: int,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.0,
        lr: float = 0.7,
        momentum: float = 0.9,
        *,
        algorithm: str = "ring",
        share: float | None = None,
    ) -> None:
        who = f"rank {comm.rank}: StreamingOuterOptimizer"
        check_whole(f"{who}: every", every, 1)
        check_whole(f"{who}: fragments", fragments, 1)
        check_whole(f"{who}: delay", delay, 0)
        check_number(f"{who}: mixing", mixing, least=0)
        if fragments > every or delay >= every or mixing > 1:
            raise UsageError(
                f"{who}(every={every}, fragments={fragments}, delay={delay}, mixing={mixing:g}); it needs at most"
                " `every` fragments, a delay below `every` and a mixing of at most 1"
            )
        self.optimizer, self.flat, self.comm = optimizer, flat, comm
        self.every, self.delay, self.mixing, self.outer_lr, self.outer_momentum = every, delay, mixing, lr, momentum
        self.algorithm, self.share = algorithm, share
        self.fragments = fragments_of(flat, fragments)
        self.turns = [turn_of(i, fragments, every) for i in range(fragments)]

        # The common weights, the momentum, and the outer gradients that were sent and not yet merged.
        self.common = track(xp.array(flat.data[: flat.numel]), "optimizer")
        self.momentum_buffer = track(xp.zeros_like(self.common), "optimizer")
        self.sent = track(xp.zeros_like(self.common), "optimizer")
        self.works: dict[int, Work] = {}  # of fragments on their way

    def step(self) -> None:
        """Make the inner step. Then send the fragment whose turn it is, and merge the one that was sent `delay` ago."""
        self.optimizer.step()
        done = self.optimizer.step_count
        for i, turn in enumerate(self.turns):
            if self._is_due(done - turn):
                self._send(i)
        for i, turn in enumerate(self.turns):
            if self._is_due(done - turn - self.delay):
                self._merge(i)

    def wait(self) -> None:
        """Wait for what is on its way. It is merged at its step all the same, by a resumed job too."""
        while self.works:
            self.works.pop(next(iter(self.works))).wait()

    def _is_due(self, since: int) -> bool:
        return since >= 0 and since % self.every == 0

    def _send(self, i: int) -> None:
        """Start the sum of a fragment's outer gradients."""
        place = self.fragments[i]
        outer = self.sent[place]
        if not outer.size:
            return
        outer[...] = self.common[place] - self.flat.data[place]
        if self.share is not None:
            outer *= outer.dtype.type(self.share)
        op, equal = "avg" if self.share is None else "sum", f"fragment {i} after {self.flat.updates}"
        with purpose("parameter_gather"):
            self.works[i] = all_reduce(self.comm, outer, op, algorithm=self.algorithm, async_op=True, equal=equal)

    def _merge(self, i: int) -> None:
        """Step the common weights of a fragment, and move this rank's own ones towards them."""
        if i in self.works:
            self.works.pop(i).wait()
        place, kind = self.fragments[i], self.common.dtype.type
        outer, common, own = self.sent[place], self.common[place], self.flat.data[place]
        momentum = self.momentum_buffer[place]
        momentum *= kind(self.outer_momentum)
        momentum += outer
        common -= kind(self.outer_lr) * (outer + kind(self.outer_momentum) * momentum)
        own[...] = kind(self.mixing) * own + kind(1 - self.mixing) * common
        self.flat.updated()
        # An offloaded optimizer steps copies on the host, which must be the new weights, too.
        self.optimizer.refresh()

    # --- in a checkpoint ---

    def _outer_state(self) -> dict[str, xp.Array]:
        """Return what is held beside the inner state, flat, by name."""
        return {OUTER: self.momentum_buffer, SENT: self.sent, OWN: self.flat.data}

    @property
    def state(self) -> dict[str, dict[str, xp.Array]]:
        """The state of both optimizers, by parameter, with the rank's own weights. Waits for what is on its way."""
        self.wait()
        result = {name: dict(arrays) for name, arrays in self.optimizer.state.items()}
        for p in self.flat.parameters:
            if p.requires_grad:
                place = self.flat.slice_of(p)
                result.setdefault(p.name, {}).update({k: a[place] for k, a in self._outer_state().items()})
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return {"step": inner steps taken, "state": `state`}."""
        return {**self.optimizer.state_dict(), "state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a `state_dict`, the rank's own weights included; the common ones have been loaded into `common`."""
        outer = self._outer_state()
        inner = {name: {k: a for k, a in arrays.items() if k not in outer} for name, arrays in saved["state"].items()}
        inner = {name: arrays for name, arrays in inner.items() if arrays}
        self.optimizer.load_state_dict({**saved, "state": inner})
        for p in self.flat.parameters:
            for key, array in outer.items():
                if key in saved["state"].get(p.name, {}):
                    xp.store(array[self.flat.slice_of(p)], saved["state"][p.name][key].reshape(-1))
        self.flat.updated()
