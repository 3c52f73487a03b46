"""Lesson 26: a save that may die at any moment, and a load by another number of ranks."""

import errno
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, drawing, is_wrong, standard_cases

# A save that may die --------------------------------------------------------------------------------------------------


class Disk:
    """Files by path, "folder/file". It records every state that it was in, after each operation and amid each write.

    left: the files that an earlier save, which died, left in the first new folder that this save asks for or writes to.
    """

    def __init__(self, files: dict[str, bytes], left: dict[str, bytes] | None = None) -> None:
        self.files, self.left = dict(files), left or {}
        self.states = [dict(files)]

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file. This is not atomic: for a moment there is half of it."""
        folder, _, file = path.rpartition("/")
        if file and folder:
            self.exists(folder)
        self.files[path] = data[: len(data) // 2]
        self._record()
        self.files[path] = data
        self._record()

    def rename(self, old: str, new: str) -> None:
        """Rename a file, or a folder with all that is in it, atomically; a file of the new name is replaced.

        Raises OSError, as POSIX does, when the new name is that of a folder with files in it.
        """
        moved = self._under(old)
        if not moved:
            raise FileNotFoundError(f"there is no {old!r} to be renamed")
        if new != old and any(path.startswith(new + "/") for path in self.files):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", new)
        if new in self.files and moved != [old]:
            raise OSError(errno.ENOTDIR, "Not a directory", new)
        self.files |= {new + path[len(old) :]: self.files.pop(path) for path in moved}
        self._record()

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it. This is not atomic: one file goes after the other."""
        if not self.exists(path):
            raise FileNotFoundError(f"there is no {path!r} to be removed")
        for name in self._under(path):
            del self.files[name]
            self._record()

    def exists(self, path: str) -> bool:
        """Return whether there is such a file, or a folder with something in it."""
        if self.left and not self._under(path):
            self.files |= {f"{path}/{file}": data for file, data in self.left.items()}
            self.left = {}
            self._record()
        return bool(self._under(path))

    def _under(self, path: str) -> list[str]:
        return [name for name in self.files if name == path or name.startswith(path + "/")]

    def _record(self) -> None:
        self.states.append(dict(self.files))


def parts_of(case: Case, version: int) -> dict[str, bytes]:
    draw = case.generator(version)
    return {f"part-{i}": draw.integers(0, 256, 8).astype(np.uint8).tobytes() for i in range(case.size)}


def disk_arguments(case: Case, rank: int) -> tuple[Any, ...]:
    """Return a disk with the checkpoint "step-1"; what is saved is "step-2", or, with seed 1, "step-1" once more.

    With seed 2 a save of one part more has died before.
    """
    before = {f"step-1/{part}": data for part, data in parts_of(case, 1).items()}
    left = {f"part-{case.size}": b"of a save that died"} if case.seed == 2 else None
    return Disk({**before, "latest": b"step-1"}, left), "step-1" if case.seed == 1 else "step-2", parts_of(case, 2)


def loads(state: dict[str, bytes]) -> dict[str, bytes] | None:
    """Return what a job that starts now would load; None when `latest` names nothing."""
    name = state.get("latest", b"").decode(errors="replace")
    return (
        {path[len(name) + 1 :]: data for path, data in state.items() if path.startswith(name + "/")} if name else None
    )


def check_disk(case: Case, answers: Sequence[Any]) -> str:
    (states,) = answers
    whole = [parts_of(case, version) for version in (1, 2)]
    for number, state in enumerate(states):
        found = loads(state)
        if found not in whole:
            names = state.get("latest", b"").decode(errors="replace")
            damaged = [
                part for part, data in (found or {}).items() if all(data != version.get(part) for version in whole)
            ]
            what = f"{damaged[0]!r} of {names!r} is half written" if damaged else f"{names!r} is not a whole checkpoint"
            if f"part-{case.size}" in damaged:
                what = f"'part-{case.size}' of {names!r} was left by a save that died before"
            return f"killed at moment {number}, `latest` says {names!r}, and {what}"
    if loads(states[-1]) != whole[1]:
        return "at the end `latest` does not name what was to be saved"
    return ""


# Another number of ranks ----------------------------------------------------------------------------------------------


class Reader:
    """The files of a checkpoint; reading one takes time."""

    def __init__(self, comm: Comm, pieces: list[tuple[int, int]], tensor: np.ndarray) -> None:
        self.comm, self.pieces, self.tensor = comm, pieces, tensor

    def read(self, number: int) -> np.ndarray:
        first, last = self.pieces[number]
        self.comm.compute(seconds=1e-6 * (last - first), name="read")
        return self.tensor[first:last].copy()


def tensor_of(case: Case) -> np.ndarray:
    return case.generator().integers(1, 99, case.size) * 1.0


def pieces_of(case: Case) -> list[tuple[int, int]]:
    """Return the ranges that the earlier job wrote: pieces of different sizes, in any order."""
    draw = case.generator(7)
    cuts = np.sort(draw.integers(0, case.size + 1, int(draw.integers(0, 5))))
    edges = [0, *cuts.tolist(), case.size]
    pieces = [(a, b) for a, b in pairwise(edges) if a < b]
    return [pieces[i] for i in draw.permutation(len(pieces))]


def load_setup(comm: Comm, pieces: list[tuple[int, int]], tensor: np.ndarray) -> tuple[Any, ...]:
    reader = Reader(comm, pieces, tensor)
    return tensor.size, pieces, reader.read


def chunks_of(case: Case) -> list[np.ndarray]:
    edges = offsets(chunk_sizes(case.size, case.ranks))
    return [tensor_of(case)[edges[rank] : edges[rank + 1]] for rank in range(case.ranks)]


EXERCISES = [
    Exercise(
        name="26.save",
        arguments=disk_arguments,
        expected=lambda case: [None],
        answer=lambda arguments, returned: arguments[0].states,
        check_answers=check_disk,
        cases=lambda: [Case(1, size, seed) for size in (1, 2, 3) for seed in (0, 1, 2)],
        draw=drawing((1, 1), (1, 6), (0, 2)),
        par=Case(1, 3),
        communicates=False,
        unit="file",
        for_hints={
            "same_name_again": lambda f: f.case.seed == 1,
            "written_before_it_is_whole": lambda f: (
                "half written" in f.message or ("not a whole checkpoint" in f.message and "step" in f.message)
            ),
        },
    ),
    Exercise(
        name="26.load",
        arguments=lambda case, rank: (pieces_of(case), tensor_of(case)),
        setup=load_setup,
        expected=chunks_of,
        cases=standard_cases,
        par=Case(4, 23, 12),
        limits=("time",),
        for_hints={"wrong_or_raised": lambda f: is_wrong(f) or f.raised(ValueError)},
    ),
]
