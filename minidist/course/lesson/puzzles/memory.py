"""The row of memory: b01 to b20. Most are programs of a `Device`, which makes arrays from others and frees them.

Names say what an array is made from, in a network of layers 1 to n:

    a0           the input, there from the beginning
    a3           the output of layer 3, from a2 (and from p3 where the weights must be gathered)
    g3           the gradient of a3: from a3 for the last layer, else from g4 (and p4)
    w3           the gradient of layer 3's weights, from a2 and g3
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Least
from minidist.course.lesson.hint_file import hints_of
from minidist.course.lesson.puzzles import Item, own_exercises, puzzles_of

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


# A part of a goal -> what must have been done, of n layers.
DONE = {"forward": forward, "backward": backward, "updates": updates}
NOTE = 'd.make("a1") makes an array in 1 µs; it has 1,000 B where nothing else is said, until d.free("a1").'


def program(item: Item) -> dict[str, Any]:
    """Return the settings of the puzzle of a program on a Device."""
    needs: Needs = globals()[item.get("needs", "network")]

    def setup(comm: Comm, layers: int) -> tuple[Any, ...]:
        device = Device(comm, layers, needs, item.get("kilobytes", {}))
        for array in item.get("start", ["a0"]):
            device.keep(array, 0.0)
        return (device, layers)

    def check_answers(case: Case, answers: Sequence[Any]) -> str:
        goal = [name for part in item["goal"] for name in (DONE[part](case.size) if part in DONE else [part])]
        missing = [name for name in goal if name not in answers[0]]
        return f"{missing[0]} is missing: what was done is {', '.join(answers[0]) or 'nothing'}" if missing else ""

    return {
        "setup": setup,
        "arguments": lambda case, rank: (case.size,),
        "answer": lambda arguments, returned: arguments[0].done,
        "check_answers": check_answers,
        "communicates": False,
        "limits": ("time", "memory"),
        "unit": "layer",
        "note": NOTE,
        "hints": hints_of({}, "programs"),
    }


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


def zero(item: Item) -> dict[str, Any]:
    """Return the settings of the puzzle of a step with shards."""
    return {"arguments": two_arrays, "expected": stepped, "limits": ("bytes",), "least": gathered}


# Bytes of a parameter -------------------------------------------------------------------------------------------------

PARAMETERS = 1200


def bytes_held(case: Case) -> list[float]:
    """Return the bytes that a rank holds at ZeRO stage `seed` on `size` ranks (Rajbhandari et al. 2020, section 5)."""
    parts = ((2, 3), (2, 2), (12, 1))  # bytes of a parameter, and the stage from which on they are sharded
    return [sum(PARAMETERS * each / (case.size if case.seed >= stage else 1) for each, stage in parts)]


def sixteen_bytes(item: Item) -> dict[str, Any]:
    """Return the settings of the puzzle of the bytes of a parameter."""
    return {
        "arguments": lambda case, rank: (case.seed, case.size, PARAMETERS),
        "expected": bytes_held,
        "label": lambda case: f"stage {case.seed}, {case.size} ranks, {PARAMETERS:,} parameters",
        "communicates": False,
    }


PUZZLES = puzzles_of("memory", globals(), {"program": program, "zero": zero, "bytes": sixteen_bytes})
EXERCISES = own_exercises(PUZZLES)
