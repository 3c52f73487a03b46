"""Saving and loading a directory of named global tensors.

Files that only the same number of ranks can load bind a job to its layout. So what is stored are *global* tensors, by
name and shape, each in shards; a reader does not depend on which rank wrote a shard.

    DIR/latest                            "step-00000040": the newest complete checkpoint
    DIR/step-00000040/metadata.json       state (step, losses, seed, ...), and of each tensor its shape and its shards
    DIR/step-00000040/rank-0000.safetensors ...       one file per writing rank

A save is atomic. Everything is written to DIR/.saving first; when all is on disk it is renamed, and only then `latest`
is replaced, by a rename too. A rank that dies at any moment leaves the checkpoint before it as it was. Ranks need a
file system that all of them see; they send only empty messages (three barriers, purpose `checkpoint`).

Proved by: tests/checkpoint/test_directory.py, tests/checkpoint/test_killed.py
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidist.base.errors import UsageError, nearest
from minidist.base.fingerprint import fingerprint
from minidist.base.half import named_dtype
from minidist.base.trace import purpose
from minidist.checkpoint.storage import Storage
from minidist.comm import Comm
from minidist.comm.mpi.staging import fetch, is_device_array

FORMAT = "minidist-checkpoint-1"
SAVING = ".saving"


class ReplicaId(NamedTuple):
    """This rank's number among the `size` ranks that hold the same values."""

    number: int = 0
    size: int = 1


SINGLE = ReplicaId()  # no other rank holds the same values


@dataclass(frozen=True)
class CheckpointShard:
    """A part of the global tensor `name` of `shape`, held by this rank.

    Either elements [start, stop) of the tensor in C order (`stop` None: all of it), or the `box` ((start, stop) for
    each dim). replica: when several ranks hold the same values; one of them writes.
    """

    name: str
    shape: tuple[int, ...]
    array: Any
    start: int = 0
    stop: int | None = None
    box: tuple[tuple[int, int], ...] | None = None
    replica: ReplicaId = SINGLE

    def place(self) -> dict[str, Any]:
        """Return the place of the shard in its tensor, for the metadata."""
        if self.box is not None:
            return {"box": [list(pair) for pair in self.box]}
        return {"range": [self.start, int(np.prod(self.shape)) if self.stop is None else self.stop]}


def save(
    comm: Comm,
    directory: str | Path,
    step: int,
    shards: Iterable[CheckpointShard],
    state: dict[str, Any],
    storage: Storage | None = None,
) -> Path:
    """Write a checkpoint of all ranks' shards and, from rank 0, of `state` (what JSON can hold); returns its path.

    Every rank calls it. Errors: UsageError when the shards of a tensor do not cover it, or overlap, or when rank 0 does
    not see another rank's files.
    """
    storage, root = storage or Storage(), Path(directory)
    saving = root / SAVING
    with purpose("checkpoint"):
        # [1] An empty folder, before any rank writes into it.
        if comm.rank == 0:
            storage.make(saving)
        comm.barrier()

        # [2] Every rank writes its shards, and chooses the name before rank 0 makes that directory.
        _write_shards(comm.rank, saving, shards, storage)
        name = _unused(root, step)
        comm.barrier()
        # [3] All files are on disk: the metadata, the folder's final name, and `latest`, each in one step.
        if comm.rank == 0:
            _complete(comm.size, saving, step, state, storage)
            storage.rename(saving, root / name)
            storage.write(root / "latest.new", name.encode())
            storage.rename(root / "latest.new", root / "latest")
        comm.barrier()
    return root / name


def _unused(root: Path, step: int) -> str:
    """Return a name such as step-00000040, with a number appended when a run saved this step before."""
    name, number = f"step-{step:08d}", 0
    while (root / name).exists():
        number += 1
        name = f"step-{step:08d}.{number}"
    return name


def _write_shards(rank: int, folder: Path, shards: Iterable[CheckpointShard], storage: Storage) -> None:
    """Write this rank's file of tensors, and a list of its content for rank 0."""
    from safetensors.numpy import save as pack

    mine, listed = {}, []
    for number, shard in enumerate(shards):
        # One of the ranks with the same values writes them; the name decides which, so that they share the work.
        if zlib.crc32(shard.name.encode()) % shard.replica.size != shard.replica.number:
            continue
        key, array = (
            f"{number}",
            np.ascontiguousarray(fetch(shard.array) if is_device_array(shard.array) else shard.array),
        )
        mine[key] = array
        what = {"name": shard.name, "shape": list(shard.shape), "dtype": str(array.dtype), "checksum": _checksum(array)}
        listed.append({**what, **shard.place(), "file": f"rank-{rank:04d}.safetensors", "key": key})
    # A rank whose values are all written by others writes an empty list only.
    content = pack(mine) if mine else b""
    if mine:
        storage.write(folder / f"rank-{rank:04d}.safetensors", content)
    storage.write(folder / f"rank-{rank:04d}.json", json.dumps({"pieces": listed, "bytes": len(content)}).encode())


def _complete(ranks: int, folder: Path, step: int, state: dict[str, Any], storage: Storage) -> None:
    """Merge all ranks' lists into one metadata file; rank 0 calls it."""
    tensors: dict[str, Any] = {}
    files: dict[str, int] = {}

    # What each rank has written, by tensor.
    for rank in range(ranks):
        path = folder / f"rank-{rank:04d}.json"
        if not path.exists():
            raise UsageError(
                f"checkpoint {folder.parent}: rank 0 does not see {path.name} of rank {rank}; save to a file system"
                " that all ranks share"
            )
        record = json.loads(path.read_bytes())
        if record["bytes"]:
            files[f"rank-{rank:04d}.safetensors"] = record["bytes"]
        for piece in record["pieces"]:
            name, shape, dtype = piece.pop("name"), piece.pop("shape"), piece.pop("dtype")
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "pieces": []})
            if (entry["shape"], entry["dtype"]) != (shape, dtype):
                raise UsageError(
                    f"checkpoint: tensor {name!r} is {dtype}{shape} on rank {rank} and {entry['dtype']}{entry['shape']}"
                    " on another"
                )
            entry["pieces"].append(piece)

    # Every element of every tensor is written, and once.
    for name, entry in tensors.items():
        covered = np.zeros(int(np.prod(entry["shape"])), np.int8)
        for piece in entry["pieces"]:
            covered[_indices(piece, entry["shape"])] += 1
        if not (covered == 1).all():
            wrong = int(np.flatnonzero(covered != 1)[0])
            raise UsageError(
                f"checkpoint: element {wrong} of tensor {name!r} is in {covered[wrong]} shards; each must be in one"
                " (see CheckpointShard.replica)"
            )

    body = {"format": FORMAT, "step": step, "ranks": ranks, "state": state, "files": files, "tensors": tensors}
    storage.write(
        folder / "metadata.json", json.dumps({**body, "checksum": _digest(json.dumps(body).encode())}).encode()
    )

    # Their content is in the metadata now.
    for rank in range(ranks):
        storage.remove(folder / f"rank-{rank:04d}.json")


def _indices(piece: dict[str, Any], shape: Sequence[int]) -> Any:
    """Return the elements of a shard in the flat tensor: a slice, or for a box an array of numbers."""
    if "range" in piece:
        return slice(*piece["range"])

    # A box: the numbers of its elements, in C order.
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return numbers[tuple(slice(*pair) for pair in piece["box"])].reshape(-1)


def _digest(data: bytes) -> str:
    return fingerprint(data).tobytes().hex()


def _checksum(array: Any) -> str:
    return _digest(np.ascontiguousarray(array).tobytes())


def _latest(root: Path) -> str:
    """Return the name in the file `latest`; UsageError, with the newest complete one, when it names none."""
    name = ""
    try:
        name = (root / "latest").read_text(encoding="utf-8").strip()
        found = name != "" and (root / name).is_dir()
    except (OSError, ValueError):  # no file, no text, or no path
        found = False
    if not found:
        # Only a complete checkpoint has its metadata under this name.
        there = sorted(path.parent.name for path in root.glob("step-*/metadata.json"))
        remedy = (
            f"write {there[-1]} into it"
            if there
            else "there is no complete checkpoint beside it, so start anew without --resume"
        )
        raise UsageError(f"the file 'latest' in {str(root)!r} names no checkpoint ({name[:40]!r}); {remedy}")
    return name


class Checkpoint:
    """A checkpoint on disk, opened for reading: `latest` in `directory`, or one by name.

    step, state: what was saved. tensors: name -> {"shape", "dtype", "pieces"}. Each rank opens and reads for itself,
    and only the files that it needs; whatever it reads is checked. Errors: UsageError in one sentence that names file
    and tensor; nothing is returned of a damaged shard.
    """

    def __init__(self, directory: str | Path, name: str | None = None) -> None:
        root = Path(directory)
        if name is None:
            if not (root / "latest").exists():
                raise UsageError(
                    f"there is no checkpoint in {str(root)!r} (no file 'latest'); name one that train --save has"
                    " written, or train without --resume"
                )
            name = _latest(root)
        self.path = root / name

        # The checksum covers all of the metadata, so a file that was cut off or edited is noticed here.
        metadata = self.path / "metadata.json"
        try:
            record = json.loads(metadata.read_bytes())
            checksum = record.pop("checksum")
            intact = checksum == _digest(json.dumps(record).encode()) and record["format"] == FORMAT
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            intact = False
        if not intact:
            raise UsageError(
                f"checkpoint {str(self.path)!r}: its file 'metadata.json', which lists all tensors, is missing or"
                " damaged; use an older checkpoint"
            )

        self.step: int = record["step"]
        self.state: dict[str, Any] = record["state"]
        self.files: dict[str, int] = record["files"]
        self.tensors: dict[str, Any] = record["tensors"]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read elements [start, stop) of tensor `name` in C order, as a new 1-D array."""
        if name not in self.tensors:
            raise UsageError(f"checkpoint {str(self.path)!r} has no tensor {name!r}{nearest(name, self.tensors)}")
        entry = self.tensors[name]
        stop = int(np.prod(entry["shape"])) if stop is None else stop
        result = np.empty(stop - start, named_dtype(entry["dtype"]))

        # Only shards that overlap with the range are read from disk.
        for piece in entry["pieces"]:
            place = _indices(piece, entry["shape"])
            if isinstance(place, slice):
                first, last = max(place.start, start), min(place.stop, stop)
                if first < last:
                    result[first - start : last - start] = self._shard(name, piece).reshape(-1)[
                        first - place.start : last - place.start
                    ]
            else:
                wanted = (place >= start) & (place < stop)
                if wanted.any():
                    result[place[wanted] - start] = self._shard(name, piece).reshape(-1)[wanted]
        return result

    def tensor(self, name: str) -> np.ndarray:
        """Read the whole tensor in its shape."""
        values = self.read(name)
        return values.reshape(self.tensors[name]["shape"])

    def _shard(self, name: str, piece: dict[str, Any]) -> np.ndarray:
        from safetensors import SafetensorError, safe_open

        # The file's size, its header, and the tensor's checksum are checked, in this order.
        path = self.path / piece["file"]
        where = f"checkpoint {str(self.path)!r}: file {piece['file']!r}, which holds tensor {name!r},"
        if not path.exists():
            raise UsageError(f"{where} is missing; copy the whole directory, or use an older checkpoint")
        if path.stat().st_size != self.files[piece["file"]]:
            raise UsageError(
                f"{where} has {path.stat().st_size} B instead of {self.files[piece['file']]}; copy it again, or use an"
                " older checkpoint"
            )
        try:
            with safe_open(path, framework="numpy") as file:
                array = file.get_tensor(piece["key"])
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(f"{where} is damaged ({error}); use an older checkpoint") from None
        if _checksum(array) != piece["checksum"]:
            raise UsageError(f"{where} is damaged: the tensor's checksum differs; use an older checkpoint")
        return array  # type: ignore[no-any-return]
