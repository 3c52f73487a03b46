"""The row of memory: b01 to b20. Most are programs of a `Device`, which makes arrays from others and frees them.

Names say what an array is made from, in a network of layers 1 to n:

    a0           the input, there from the beginning
    a3           the output of layer 3, from a2 (and from p3 where the weights must be gathered)
    g3           the gradient of a3: from a3 for the last layer, else from g4 (and p4)
    w3           the gradient of layer 3's weights, from a2 and g3

Proved by: tests/lesson/test_puzzles.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Hint, Least, returns
from minidist.course.lesson.exercises import (
    e02_free_in_order,
    e10_recompute,
    e11_flat_partition,
    e12_prefetch,
    e12b_offload,
)
from minidist.course.lesson.puzzles import Puzzle, above, of_lesson, puzzle, raises, says

KILOBYTE, MICROSECOND = 1000, 1e-6
PURPOSES = {"a": "activation", "g": "activation_gradient", "w": "gradient", "p": "unsharded"}
SPANS = {"a": "F", "g": "I", "w": "W", "p": "gather "}
Needs = Callable[[str, int, int], list[str]]  # from the kind of an array, its layer and the number of layers


class Device:
    """The memory of one rank. An array has 1,000 B, where the puzzle says nothing else; making one takes 1 µs.

    done: what was made or updated. link: when the copies to and from the host that were started are over.
    """

    def __init__(self, comm: Comm, layers: int, needs: Needs, kilobytes: dict[str, int]) -> None:
        self.comm, self.layers, self.needs, self.kilobytes = comm, layers, needs, kilobytes
        self.alive: dict[str, float] = {}  # name -> when it can be used
        self.done: list[str] = []
        self.host: set[str] = set()
        self.link = 0.0

    def make(self, name: str) -> None:
        """Make an array from those that it needs, which must be in memory."""
        needed = self.needs(name[:1], int(name[1:]), self.layers)
        self.wait_for(f"make({name!r})", *needed)
        self.keep(name, 0.0)
        self.comm.compute(seconds=MICROSECOND, name=SPANS[name[0]] + name[1:])
        self.done.append(name)

    def free(self, name: str) -> None:
        """Free an array, which must be in memory."""
        self.wait_for(f"free({name!r})", name)
        del self.alive[name]
        self.note()

    def update(self, layer: int) -> None:
        """Change the weights of a layer by their gradient, which must be in memory."""
        self.wait_for(f"update({layer})", f"w{layer}")
        self.done.append(f"update {layer}")

    def out(self, name: str) -> None:
        """Copy an array to the host, wait until it is there, and free it here. A copy takes 2 µs."""
        self.wait_for(f"out({name!r})", name)
        self.comm.compute(seconds=2 * MICROSECOND, name=f"out {name}")
        self.host.add(name)
        self.free(name)

    def back(self, name: str) -> None:
        """Start to copy an array from the host. It has its place at once, and whoever needs it waits for the copy."""
        if name not in self.host:
            raise UsageError(f"back({name!r}): the host has no {name}; it has {', '.join(sorted(self.host)) or 'none'}")
        self.link = max(self.link, self.comm.time()) + 2 * MICROSECOND
        self.keep(name, self.link)

    def wait_for(self, what: str, *names: str) -> None:
        """Wait until these arrays can be used. Raises UsageError where one is not in memory."""
        for name in names:
            if name not in self.alive:
                raise UsageError(f"{what} needs {name}, which is not in memory; there are {', '.join(self.alive)}")
        left = max((self.alive[name] for name in names), default=0.0) - self.comm.time()
        if left > 0:
            self.comm.compute(seconds=left, name="wait")

    def keep(self, name: str, ready: float) -> None:
        """Count an array from now on. Raises UsageError where it is there already."""
        if name in self.alive:
            raise UsageError(f"{name} is in memory already; free it before you make it again")
        self.alive[name] = ready
        self.note()

    def note(self) -> None:
        """Write the bytes that are alive into the trace."""
        live: dict[str, int] = {}
        for name in self.alive:
            purpose = PURPOSES[name[0]]
            live[purpose] = live.get(purpose, 0) + KILOBYTE * self.kilobytes.get(name[0], 1)
        self.comm.trace.memory.append((self.comm.time(), live))


def network(kind: str, i: int, n: int) -> list[str]:
    """Return what an array needs in a network of n layers whose weights are all there."""
    if kind == "a":
        return [f"a{max(0, i - 1)}"]  # nothing makes the input a0
    if kind == "g":
        return [f"a{n}"] if i == n else [f"g{i + 1}"]
    return [f"a{i - 1}", f"g{i}"]


def sharded(kind: str, i: int, n: int) -> list[str]:
    """Return the same where the weights p of a layer must have been gathered."""
    if kind == "p":
        return []
    weights = {"a": [f"p{i}"] if i else [], "g": [f"p{i + 1}"] if i < n else []}
    return [*network(kind, i, n), *weights.get(kind, [])]


def two_parts(kind: str, i: int, n: int) -> list[str]:
    """Return what w1 = f(a1, g1), a1 = f(p1) and g1 need."""
    return {"w": ["a1", "g1"], "a": ["p1"]}.get(kind, [])


def micro_batches(kind: str, i: int, n: int) -> list[str]:
    """Return what the activations and the gradient of micro-batch i need."""
    return [f"a{i}"] if kind == "w" else []


def forward(n: int) -> list[str]:
    return [f"a{i}" for i in range(1, n + 1)]


def backward(n: int) -> list[str]:
    return [name for i in range(n, 0, -1) for name in (f"w{i}", f"g{i - 1}")]


def updates(n: int) -> list[str]:
    return [f"update {i}" for i in range(1, n + 1)]


def program(
    text: str, goal: Callable[[int], Sequence[str]], *hints: Hint, needs: Needs = network, **more: Any
) -> Puzzle:
    """Return the puzzle of a program on a Device. goal: what must have been done, of n layers."""
    kilobytes, start = more.get("kilobytes", {}), more.get("start", ["a0"])

    def setup(comm: Comm, layers: int) -> tuple[Any, ...]:
        device = Device(comm, layers, needs, kilobytes)
        for array in start:
            device.keep(array, 0.0)
        return (device, layers)

    def check_answers(case: Case, answers: Sequence[Any]) -> str:
        missing = [item for item in goal(case.size) if item not in answers[0]]
        return f"{missing[0]} is missing: what was done is {', '.join(answers[0]) or 'nothing'}" if missing else ""

    return puzzle(
        text,
        [Case(1, n) for n in more.get("sizes", (2, 3, 4))],
        *hints,
        says("which is not in memory", "it was freed too early, or not made yet: name what each `make` needs"),
        note='d.make("a1") makes an array in 1 µs; it has 1,000 B where nothing else is said, until d.free("a1").',
        setup=setup,
        arguments=lambda case, rank: (case.size,),
        expected=lambda case: (),
        answer=lambda arguments, returned: arguments[0].done,
        check_answers=check_answers,
        communicates=False,
        limits=("time", "memory"),
        unit="layer",
    )


TOO_LONG = above("memory", "some array is alive after its last use: write down, for each, which line needs it last")

PUZZLES = [
    program(
        """
        b01 What no line needs any more
        A network of two layers runs forward: a1 is made from a0, and a2 from a1. Never have more than two arrays.

        def forward(d, n):
            d.make("a1")
            ____
            d.make("a2")
        """,
        forward,
        TOO_LONG,
        says("needs a1", "a2 is made from a1: the array that no line needs any more is a0"),
        sizes=(2,),
    ),
    program(
        """
        b02 Any number of layers
        The same for n layers: as soon as the output of a layer is there, its input can go.

        def deep(d, n):
            for i in range(1, n + 1):
                d.make(f"a{i}")
                ____
        """,
        forward,
        TOO_LONG,
        says("which is not in memory", "layer i + 1 needs a{i}: free the input, a{i-1}"),
    ),
    program(
        """
        b03 The large one first
        w1 is made from a1 and g1. a1 is made from p1, which has 4,000 B; g1 from nothing. In which order do you
        make, and free, so that the peak is 5,000 B? p1 is not needed in the end.

        def two_parts(d, n):
            ____
            d.make("w1")
        """,
        lambda n: ["w1"],
        above("memory", "g1 waits in memory while p1 is there: make p1 and a1, free p1, and only then make g1"),
        needs=two_parts,
        kilobytes={"p": 4},
        start=[],
        sizes=(1,),
    ),
    program(
        """
        b04 Backward frees what forward kept
        Forward keeps every input. Backward makes w{i} from a{i-1} and g{i}, then g{i-1} from g{i}. Free each array
        right after its last use; the weights' gradients w stay.

        def train(d, n):
            for i in range(1, n + 1):
                d.make(f"a{i}")
            d.make(f"g{n}")
            d.free(f"a{n}")
            for i in range(n, 0, -1):
                d.make(f"w{i}")
                ____
                d.make(f"g{i - 1}")
                ____
        """,
        lambda n: [*forward(n), *backward(n)],
        TOO_LONG,
        says("make('g", "g{i-1} is made from g{i}: free g{i} after it"),
        says("free('a", "a{n} is gone already: layer i had the input a{i-1}"),
    ),
    program(
        """
        b05 Update at once
        d.update(i) changes the weights of layer i by w{i}, which has 3,000 B here. Do it where w{i} need not wait
        for the other layers.

        def update_at_once(d, n):
            for i in range(1, n + 1):
                d.make(f"a{i}")
            d.make(f"g{n}")
            d.free(f"a{n}")
            for i in range(n, 0, -1):
                d.make(f"w{i}")
                d.free(f"a{i - 1}")
                ____
                d.make(f"g{i - 1}")
                d.free(f"g{i}")
        """,
        lambda n: [*forward(n), *backward(n), *updates(n)],
        above("memory", "w{i} is not needed after its update: free it"),
        says("update", "every layer gets an update, before its w{i} is freed"),
        kilobytes={"w": 3},
    ),
    program(
        """
        b06 Make it again
        In memory are a0, a2 and g3. Backward of layer 2 needs a1, which forward has freed: make it again from a0,
        as late as possible, and free it after its last use.

        def make_it_again(d, n):
            d.make("w3")
            d.free("a2")
            d.make("g2")
            d.free("g3")
            ____
            d.make("w2")
            ____
            d.make("g1")
            d.free("g2")
            d.make("w1")
        """,
        lambda n: ["w3", "w2", "w1"],
        TOO_LONG,
        says("make('w2') needs a1", "a1 is made from a0, by d.make, before w2 needs it"),
        sizes=(3,),
        start=["a0", "a2", "g3"],
    ),
    program(
        """
        b07 Keep every second one
        n is even. Forward keeps a0, a2, a4, ... and frees the others; backward makes the freed inputs again. For
        which i? The input of layer i is a{i-1}.

        def every_second(d, n):
            for i in range(1, n + 1):
                d.make(f"a{i}")
                if ____:
                    d.free(f"a{i - 1}")
            d.make(f"g{n}")
            d.free(f"a{n}")
            for i in range(n, 0, -1):
                if ____:
                    d.make(f"a{i - 1}")
                d.make(f"w{i}")
                d.free(f"a{i - 1}")
                d.make(f"g{i - 1}")
                d.free(f"g{i}")
        """,
        lambda n: [*forward(n), *backward(n)],
        says("which is not in memory", "a{i-1} has an odd number where i is even: those are freed, and made again"),
        says("already", "what forward kept need not be made again: a{i-1} is missing where i is even"),
        sizes=(2, 4, 8),
    ),
    program(
        """
        b08 One micro-batch after the other
        Micro-batch i has the activations a{i}, and its gradient w{i} is added to the sum by d.update(i). The batch
        must not need more memory than one micro-batch.

        def accumulate(d, m):
            for i in range(1, m + 1):
                d.make(f"a{i}")
                d.make(f"w{i}")
                ____
        """,
        updates,
        TOO_LONG,
        says("update", "each micro-batch is added to the sum while its w{i} is there"),
        needs=micro_batches,
        start=[],
    ),
    program(
        """
        b09 Gather, use, drop
        With ZeRO 3 a rank has shards. Layer i runs with its whole weights p{i}, of 4,000 B, which d.make gathers.
        Have one layer's weights at a time.

        def gather_use_drop(d, n):
            for i in range(1, n + 1):
                d.make(f"p{i}")
                d.make(f"a{i}")
                ____
        """,
        forward,
        TOO_LONG,
        needs=sharded,
        kilobytes={"p": 4},
    ),
    program(
        """
        b10 And gather again
        In memory are a0, a1, a2 and g3. Backward of layer i needs its weights a second time: g{i-1} is made from
        g{i} with p{i}, of 4,000 B. Gather them as late, and drop them as early, as you can.

        def gather_again(d, n):
            for i in range(n, 0, -1):
                d.make(f"w{i}")
                d.free(f"a{i - 1}")
                ____
                d.make(f"g{i - 1}")
                ____
        """,
        backward,
        TOO_LONG,
        says("needs p", "g{i-1} needs p{i}, which forward has dropped: make it again"),
        needs=sharded,
        kilobytes={"p": 4},
        sizes=(3,),
        start=["a0", "a1", "a2", "g3"],
    ),
]


# ZeRO on several ranks ------------------------------------------------------------------------------------------------


def two_arrays(case: Case, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights, equal on all ranks, and the rank's gradient; the size counts the elements of a shard."""
    weights = 100.0 + np.arange(case.size * case.ranks)
    return weights, (rank + 1.0) * np.arange(1, weights.size + 1)


def stepped(case: Case) -> list[np.ndarray]:
    """Return the weights less the sum of all gradients, on each rank."""
    both = [two_arrays(case, rank) for rank in range(case.ranks)]
    return [both[0][0] - sum(gradient for _, gradient in both)] * case.ranks


def own_shards(case: Case) -> list[np.ndarray]:
    """Return the weights less the gradient of the rank that owns each shard alone."""
    shards = [slice(rank * case.size, (rank + 1) * case.size) for rank in range(case.ranks)]
    parts = [np.subtract(*two_arrays(case, rank))[shards[rank]] for rank in range(case.ranks)]
    return [np.concatenate(parts)] * case.ranks


def gathered(case: Case) -> Least:
    """Return the least with which every rank knows the shards of all."""
    messages = case.ranks * (case.ranks > 1)
    return Least(messages, 8 * case.size * case.ranks * (case.ranks - 1))


SHARDED = (Case(2, 1), Case(3, 2), Case(4, 3))
ZERO: dict[str, Any] = {"arguments": two_arrays, "expected": stepped, "limits": ("bytes",), "least": gathered}


# Bytes of a parameter -------------------------------------------------------------------------------------------------

PARAMETERS = 1200


def bytes_held(case: Case) -> list[float]:
    """Return the bytes that a rank holds at ZeRO stage `seed` on `size` ranks (Rajbhandari et al. 2020, section 5)."""
    parts = ((2, 3), (2, 2), (12, 1))  # bytes of a parameter, and the stage from which on they are sharded
    return [sum(PARAMETERS * each / (case.size if case.seed >= stage else 1) for each, stage in parts)]


PUZZLES += [
    puzzle(
        """
        b11 Only my shard
        With ZeRO 1 each rank updates 1/n of the weights, then all ranks gather the whole. The gradients are summed
        already. Take the rank's slice of both.

        from minidist.core.collectives import all_gather, all_reduce


        def only_my_shard(comm, weights, gradient):
            all_reduce(comm, gradient)
            size = weights.size // comm.size
            mine = ____
            mine -= ____
            return all_gather(comm, mine.copy())
        """,
        SHARDED,
        raises(ValueError, "both slices have `size` elements"),
        says("shape", "every rank gathers everything: rank r has elements r * size to (r + 1) * size"),
        says("expected", "the slice of the gradient is that of the weights, and another one on each rank"),
        **ZERO,
    ),
    puzzle(
        """
        b12 Only its gradient, too
        With ZeRO 2 no rank needs the whole sum of the gradients. reduce_scatter(comm, array) returns a rank's shard
        of it, for half the bytes of all_reduce.

        from minidist.core.collectives import all_gather, all_reduce, reduce_scatter


        def only_its_gradient(comm, weights, gradient):
            size = weights.size // comm.size
            mine = weights[comm.rank * size : (comm.rank + 1) * size]
            mine -= ____
            return all_gather(comm, mine.copy())
        """,
        SHARDED,
        above("bytes", "an all-reduce is a reduce-scatter and an all-gather: the first half is enough here"),
        returns(own_shards, "this is the rank's own gradient: the others' have to be added"),
        raises((ValueError, MismatchError), "what is subtracted has `size` elements"),
        **ZERO,
    ),
    puzzle(
        """
        b13 Sixteen bytes
        Mixed precision with Adam holds 16 B per parameter: 2 for the weight, 2 for the gradient, 12 for the
        optimizer. From which stage on is which of them 1/n?

        def sixteen_bytes(stage, n, parameters):
            weights, gradients, optimizer = 2 * parameters, 2 * parameters, 12 * parameters
            if stage >= 1:
                ____
            if stage >= 2:
                ____
            if stage >= 3:
                ____
            return weights + gradients + optimizer
        """,
        [Case(1, n, stage) for n, stage in ((4, 0), (4, 1), (4, 2), (8, 3))],
        says("expected", "the largest goes first: stage 1 shards the optimizer, 2 the gradients, 3 the weights"),
        arguments=lambda case, rank: (case.seed, case.size, PARAMETERS),
        expected=bytes_held,
        label=lambda case: f"stage {case.seed}, {case.size} ranks, {PARAMETERS:,} parameters",
        communicates=False,
    ),
    program(
        """
        b14 Off to the host
        d.out("a1") copies an array to the host and frees it here; d.back("a1") brings it back. Each layer's input
        leaves after its use in forward, and comes back for its w.

        def off_to_the_host(d, n):
            for i in range(1, n + 1):
                d.make(f"a{i}")
                ____
            d.make(f"g{n}")
            d.free(f"a{n}")
            for i in range(n, 0, -1):
                ____
                d.make(f"w{i}")
                d.free(f"a{i - 1}")
                d.update(i)
                d.free(f"w{i}")
                d.make(f"g{i - 1}")
                d.free(f"g{i}")
        """,
        lambda n: [*forward(n), *backward(n), *updates(n)],
        TOO_LONG,
        says("the host has no", "the input of layer i is a{i-1}: it goes out and comes back under this name"),
        says("which is not in memory", "layer i + 1 needs a{i}: what leaves is the input, a{i-1}"),
    ),
    program(
        """
        b15 One ahead
        d.back returns at once, and whoever needs the array waits for the copy, which takes 2 µs. Start the copy for
        the next layer of backward before you compute this one: two copies in memory, and no more.

        def one_ahead(d, n):
            for i in range(1, n + 1):
                d.make(f"a{i}")
                d.out(f"a{i - 1}")
            d.back(f"a{n - 1}")
            d.make(f"g{n}")
            d.free(f"a{n}")
            for i in range(n, 0, -1):
                if i > 1:
                    ____
                d.make(f"w{i}")
                d.free(f"a{i - 1}")
                d.update(i)
                d.free(f"w{i}")
                d.make(f"g{i - 1}")
                d.free(f"g{i}")
        """,
        lambda n: [*forward(n), *backward(n), *updates(n)],
        says("already", "a{i-1} is on its way since the step before: bring the one after it"),
        says("which is not in memory", "the next layer of backward is i - 1, and its input is a{i-2}"),
    ),
    of_lesson(
        """
        b16 Free in order
        free_in_order(layers, x, loss_gradient)
        One step of a network with as few bytes alive as possible: layer.forward(x), loss_gradient(y),
        layer.weight_gradient(x, g), layer.input_gradient(g), layer.update(weight_gradient). An array is freed when
        no name refers to it.
        """,
        e02_free_in_order.EXERCISES[0],
    ),
    of_lesson(
        """
        b17 Where to cut
        pick_segments(saved, boundary, budget)
        Layer i saves saved[i] bytes. With recomputation a segment keeps its input, of `boundary` bytes, and one
        segment at a time keeps all. Return the number of layers of each segment, as few segments as fit into
        `budget`, or None.
        """,
        e10_recompute.EXERCISES[0],
    ),
    of_lesson(
        """
        b18 A flat partition
        zero_step(comm, weights, gradients, update)
        Step the weights, arrays of any shapes, as one flat array with padding: each rank calls update(shard,
        gradient) once, on its shard and the summed gradient of it, and all ranks end with the new weights.
        """,
        e11_flat_partition.EXERCISES[0],
    ),
    of_lesson(
        """
        b19 Prefetch
        prefetch(comm, layers, x, gather, compute)
        gather(layer) starts to gather a layer's weights; its .wait() returns them; compute(layer, weights, x)
        returns the next x. Return the last x; hide each gather behind a computation, with two layers in memory at
        most.
        """,
        e12_prefetch.EXERCISES[0],
    ),
    of_lesson(
        """
        b20 Three streams
        offloaded_step(comm, pieces, down, step, up)
        down(i) starts to bring the gradient of piece i to the host, step(i, gradient) returns its new values, and
        up(i, values) starts to bring them back; wait with .wait(). Keep both directions and the host busy at once.
        """,
        e12b_offload.EXERCISES[0],
    ),
]
EXERCISES = [item.exercise for item in PUZZLES if item.exercise.name.startswith("puzzle.")]
