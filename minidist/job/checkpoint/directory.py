"""Saving and loading a directory of named global tensors.

Files that only the same number of ranks can load bind a job to its layout. So what is stored are *global* tensors, by
name and shape, each in shards; a reader does not depend on which rank wrote a shard.

    DIR/latest                            "step-00000040": the newest complete checkpoint
    DIR/step-00000040/metadata.json       state (step, losses, seed, ...), and of each tensor its shape and its shards
    DIR/step-00000040/rank-0000.safetensors ...       one file per writing rank
    DIR/step-00000040.1                   another one of that step: an older run's was there, or steps were made again

A save is atomic. Everything is written to DIR/.saving-TOKEN first; when all is on disk it is renamed, and only then
`latest` is replaced, by a rename too. A rank that dies at any moment leaves the checkpoint before it as it was. Ranks
need a file system that all of them see.

Two jobs never mix their files. A lock on DIR refuses the second one (`Storage.locked`); and where there are no locks,
the token, which rank 0 draws for each save and sends to all ranks, is in the folder's name and in every rank's list. It
is all that is sent: 16 B per rank but rank 0, and a barrier's empty messages (purpose `checkpoint`).

Proved by: tests/checkpoint/test_directory.py, tests/checkpoint/test_killed.py, tests/checkpoint/test_lock.py
"""

import json
import secrets
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, nearest, quoted, quoted_path, reason
from minidist.base.files import writing
from minidist.base.half import named_dtype
from minidist.base.read_file import parse_json
from minidist.base.records import Field, Record, WrongValue
from minidist.core.base.random import fingerprint
from minidist.core.base.trace import purpose
from minidist.core.collectives import barrier, broadcast
from minidist.core.comm import Comm
from minidist.job.checkpoint.held import SINGLE, ReplicaId
from minidist.job.checkpoint.storage import SAVING, Storage

FORMAT = "minidist-checkpoint-1"
MAX_NAME = 256  # bytes of the file `latest`
MAX_METADATA = 2**28  # bytes of metadata.json; a million shards have about 200 MB
DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "bool"),
    *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)),
)
TOKEN_BYTES = 16  # two numbers: the token, and the number in the checkpoint's name


@dataclass(frozen=True)
class CheckpointShard:
    """A part of the global tensor `name` of `shape`, held by this rank.

    Either elements [start, stop) of the tensor in C order (`stop` None: all of it), or the `box` ((start, stop) for
    each dim). replica: when several ranks hold the same values; one of them writes. sparse: many values are zero, so
    the others are stored, with a bit for each element; of bools the bits alone. kept: the number of nonzero elements; a
    dry run needs it because its arrays have no values.
    """

    name: str
    shape: tuple[int, ...]
    array: Any
    start: int = 0
    stop: int | None = None
    box: tuple[tuple[int, int], ...] | None = None
    replica: ReplicaId = SINGLE
    sparse: bool = False
    kept: int | None = None

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
    not see another rank's files, when another job holds the directory's lock, when JSON cannot hold a value of `state`,
    and when a file cannot be written.
    """
    storage, root = storage or Storage(), Path(directory)
    if comm.rank == 0 and storage.has_files:
        _check_state(state)
    what, remedy = (
        f"rank {comm.rank}: the checkpoint of step {step}",
        "make room there, or --save into a directory that all ranks share",
    )
    with purpose("checkpoint"), writing(what, root, remedy), ExitStack() as stack:
        # [1] Rank 0 makes an empty folder for this save alone, and tells the others its token and the final name.
        plan = np.zeros(2, np.int64)
        if comm.rank == 0:
            stack.enter_context(storage.locked(root))
            plan[:] = secrets.randbits(62), _unused(root, step)
            storage.make(_saving(root, plan))
        broadcast(comm, plan)
        saving, name = _saving(root, plan), _name(step, int(plan[1]))

        # [2] Every rank writes its shards.
        _write_shards(comm.rank, saving, shards, storage)
        barrier(comm)

        # [3] All files are on disk: the metadata, the folder's final name, and `latest`, each in one step.
        if comm.rank == 0 and storage.has_files:
            _complete(comm.size, saving, step, state, storage)
            storage.rename(saving, root / name)
            pointer = saving.with_suffix(".latest")
            storage.write(pointer, name.encode())
            storage.rename(pointer, root / "latest")
        barrier(comm)
    return root / name


def _check_state(state: dict[str, Any]) -> None:
    """Raise UsageError with the first value that JSON cannot hold: a function, an array; nothing is written yet."""
    for name, value in state.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"rank 0: a checkpoint cannot hold {quoted(value)}, the state of {quoted(name)} ({reason(error)});"
                " give it numbers, texts, and lists or dicts of them"
            ) from None


def save_bytes(ranks: int) -> int:
    """Return the bytes that all `ranks` together send in one save."""
    return (ranks - 1) * TOKEN_BYTES


def _saving(root: Path, plan: np.ndarray) -> Path:
    """Return the folder of a save that is not complete."""
    return root / f"{SAVING}-{int(plan[0]):016x}"


def _name(step: int, number: int) -> str:
    """Return the name of a complete checkpoint; number: 0, or how many saves of this step there were before."""
    return f"step-{step:08d}.{number}" if number else f"step-{step:08d}"


def _unused(root: Path, step: int) -> int:
    """Return the first number for which `_name` names no checkpoint yet."""
    return next(number for number in count() if not (root / _name(step, number)).exists())


def _write_shards(rank: int, folder: Path, shards: Iterable[CheckpointShard], storage: Storage) -> None:
    """Write this rank's file of tensors, and a list of its content for rank 0."""
    mine: dict[str, Any] = {}
    listed = []
    for key, shard, array in _written(shards):
        what: dict[str, Any] = {
            "name": shard.name,
            "shape": list(shard.shape),
            "dtype": str(array.dtype),
            "checksum": _checksum(array),
        }
        stored = _stored(key, shard, array)
        if shard.sparse:
            what["kept"] = stored[key].size if key in stored else 0
        mine |= stored
        listed.append({**what, **shard.place(), "file": f"rank-{rank:04d}.safetensors", "key": key})
    # A rank whose values are all written by others writes an empty list only.
    nbytes = storage.write_tensors(folder / f"rank-{rank:04d}.safetensors", mine)
    record = {"save": folder.name, "pieces": listed, "bytes": nbytes}
    storage.write(folder / f"rank-{rank:04d}.json", json.dumps(record).encode())


def tensors_of(shards: Iterable[CheckpointShard]) -> dict[str, Any]:
    """Return the arrays in the file of the rank that has these shards, by their names there."""
    result: dict[str, Any] = {}
    for key, shard, array in _written(shards):
        result |= _stored(key, shard, array)
    return result


def _written(shards: Iterable[CheckpointShard]) -> Iterator[tuple[str, CheckpointShard, np.ndarray]]:
    """Yield the shards that a rank writes: (name in its file, shard, contiguous array)."""
    for number, shard in enumerate(shards):
        # One of the ranks with the same values writes them; the name decides which, so that they share the work.
        if zlib.crc32(shard.name.encode()) % shard.replica.size == shard.replica.number:
            array = xp.to_host(shard.array)
            # Not np.ascontiguousarray, which asks the arrays of a dry run for values. A file has no arrays of no dim.
            contiguous = array.astype(array.dtype, order="C", copy=False)
            yield f"{number}", shard, contiguous if array.ndim else contiguous.reshape(1)


def _stored(key: str, shard: CheckpointShard, array: np.ndarray) -> dict[str, Any]:
    """Return a shard's arrays in the file by name: all values, or bits and the values that are not zero, if any."""
    if not shard.sparse:
        return {key: array}
    bits, values = _compact(array, shard.kept)
    return {f"{key}.mask": bits, **({key: values} if values.size else {})}


def _compact(array: np.ndarray, kept: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return a bit for each element that is not zero, eight in a byte, and these elements; of bools none is needed.

    A zero is one whose bits are all zero: -0.0 is kept. kept: the number of nonzero elements, where the array has no
    values.
    """
    flat = array.reshape(-1)
    mask = flat.view(f"u{flat.dtype.itemsize}") != 0
    if flat.dtype == bool:
        return np.packbits(mask), flat[:0]
    return np.packbits(mask), flat[:kept] if xp.is_meta(flat) else flat[mask]


def _expanded(bits: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return the elements from the bits and values of `_compact`; ValueError when these do not fit."""
    mask = np.unpackbits(bits, count=size).astype(bool) if bits.shape == (-(-size // 8),) else np.zeros(0, bool)
    if values.dtype == bool and mask.size == size:
        return mask
    if mask.size != size or np.count_nonzero(mask) != values.size:
        raise ValueError(f"{bits.size} B of bits and {values.size} values for {size} elements")
    result = np.zeros(size, values.dtype)
    result[mask] = values
    return result


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
        record = parse_json(_read_regular(path, MAX_METADATA))
        if record["save"] != folder.name:
            raise UsageError(
                f"checkpoint {folder.parent}: {path.name} was written by another save than rank 0's; let one job at a"
                " time save into a directory"
            )
        if record["bytes"]:
            files[f"rank-{rank:04d}.safetensors"] = record["bytes"]
        for piece in record["pieces"]:
            name, shape, dtype = piece.pop("name"), piece.pop("shape"), piece.pop("dtype")
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "pieces": []})
            if (entry["shape"], entry["dtype"]) != (shape, dtype):
                raise UsageError(
                    f"checkpoint: tensor {quoted(name)} is {dtype}{shape} on rank {rank} and"
                    f" {entry['dtype']}{entry['shape']}"
                    " on another; give every rank's CheckpointShard the dtype and the shape of the whole tensor"
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
                f"checkpoint: element {wrong} of tensor {quoted(name)} is in {covered[wrong]} shards; each must be in"
                " one: give the ranks that hold the same values CheckpointShard(..., replica=ReplicaId(number, size))"
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
    return _digest(array.tobytes())


def _latest(root: Path) -> str:
    """Return the name in the file `latest`; UsageError, with the newest complete one, when it names none."""
    name = ""
    try:
        # A name and nothing else: a path would lead out of the directory.
        name = _read_regular(root / "latest", MAX_NAME).decode("utf-8").strip()
        found = name not in ("", ".", "..") and Path(name).name == name and (root / name).is_dir()
    except (OSError, ValueError):  # no file, too long, no text, or no path
        found = False
    if not found:
        # Only a complete checkpoint has its metadata under this name.
        there = complete_checkpoints(root)
        remedy = (
            f"write {there[-1]} into it"
            if there
            else "there is no complete checkpoint next to it, so start anew without --resume"
        )
        raise UsageError(f"the file 'latest' in {quoted_path(root)} names no checkpoint ({name[:40]!r}); {remedy}")
    return name


def _read_regular(path: Path, most: int) -> bytes:
    """Return the content of a file; ValueError when it is not a regular file or has more than `most` bytes."""
    # A device or a pipe may never end, or block.
    size = path.stat().st_size if path.is_file() else most + 1
    if size > most:
        raise ValueError(f"{path} is not a regular file of at most {most} bytes")
    with path.open("rb") as file:
        return file.read(size)


def complete_checkpoints(directory: str | Path) -> list[str]:
    """Return the names of the complete checkpoints in `directory`, in the order of their steps; [] when it is none."""
    return sorted(path.parent.name for path in Path(directory).glob("step-*/metadata.json"))


def name_of_step(directory: str | Path, step: int) -> str:
    """Return the name of the checkpoint of `step` that was saved last; UsageError lists the steps that there are."""
    there = complete_checkpoints(directory)
    found = [name for name in there if name.partition(".")[0] == _name(step, 0)]
    if not found:
        steps = ", ".join(dict.fromkeys(str(order_of(name)[0]) for name in there[-10:])) or "none"
        raise UsageError(
            f"the checkpoint of step {step} does not exist in {str(directory)!r}; it has those of steps {steps}"
        )
    return max(found, key=order_of)


def order_of(name: str) -> tuple[int, int]:
    """Return the step and the number in a checkpoint's name; (-1, 0) for a name that `_name` does not give."""
    step, _, number = name.removeprefix("step-").partition(".")
    return (int(step), int(number or 0)) if step.isdecimal() and (number or "0").isdecimal() else (-1, 0)


# --- the metadata of a checkpoint, as they must be before anything is allocated by them -------------------------------

Count = Annotated[int, Field(ge=0, le=2**62)]
Pair = Annotated[list[Count], Field(min_length=2, max_length=2)]


class _Piece(Record, strict=True):
    """One shard: where its elements are in the tensor, and where in a file."""

    file: str
    key: str
    checksum: str
    range: Pair | None = None
    box: list[Pair] | None = None
    kept: Count | None = None  # values that are stored, with a bit for each element; None: all of them

    def stored_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Return the bytes of the shard in its file; WrongValue when it keeps more elements than it has."""
        size = self.size(shape)
        if self.kept is None:
            return size * itemsize
        if self.kept > size:
            raise WrongValue(f"a shard of {size} elements that keeps {self.kept}")
        return self.kept * itemsize + -(-size // 8)

    def size(self, shape: Sequence[int]) -> int:
        """Return the number of its elements; WrongValue when it does not fit into a tensor of `shape`."""
        sides, lengths = ([self.range], [prod(shape)]) if self.range is not None else (self.box, shape)
        if (self.range is None) == (self.box is None) or sides is None or len(sides) != len(lengths):
            raise WrongValue("a shard that has neither a range nor a box of its tensor")
        if not all(start <= stop <= length for (start, stop), length in zip(sides, lengths, strict=True)):
            raise WrongValue(f"a shard {sides} outside of shape {list(shape)}")
        return prod(stop - start for start, stop in sides)


class _Entry(Record, strict=True):
    """One tensor."""

    shape: Annotated[list[Count], Field(max_length=32)]
    dtype: Literal[DTYPES]  # type: ignore[valid-type]
    pieces: list[_Piece]


class _Metadata(Record, strict=True):
    """The whole file."""

    format: Literal["minidist-checkpoint-1"]
    step: Count
    state: dict[str, Any]
    files: dict[str, Count]
    tensors: dict[str, _Entry]

    def check_sizes(self) -> None:
        """Raise WrongValue unless the shards fit their tensors, and the files that are said to hold them."""
        stored: Counter[str] = Counter()
        for name, entry in self.tensors.items():
            itemsize, covered = named_dtype(entry.dtype).itemsize, 0
            for piece in entry.pieces:
                covered += piece.size(entry.shape)
                stored[piece.file] += piece.stored_bytes(entry.shape, itemsize)
            if covered != prod(entry.shape):
                raise WrongValue(f"tensor {name[:80]!r} has {prod(entry.shape)} elements and its shards {covered}")

        # No name that leads out of the checkpoint, and no file with more in it than it has bytes.
        for file, nbytes in stored.items():
            if Path(file).name != file or nbytes > self.files.get(file, 0):
                raise WrongValue(f"file {file[:80]!r} cannot hold {nbytes} B of tensors")


class Checkpoint:
    """A checkpoint on disk, opened for reading: `latest` in `directory`, or one by name or by its step.

    step, state: what was saved. tensors: name -> {"shape", "dtype", "pieces"}. Each rank opens and reads for itself,
    and only the files that it needs; whatever it reads is checked. Errors: UsageError in one sentence that names file
    and tensor; nothing is returned of a damaged shard.
    """

    def __init__(self, directory: str | Path, name: str | None = None, step: int | None = None) -> None:
        root = Path(directory)
        if step is not None:
            name = name_of_step(root, step)
        if name is None:
            if not (root / "latest").exists():
                raise UsageError(
                    f"the directory {quoted_path(root)} has no checkpoint (no file 'latest'); name one that train"
                    " --save has written, or train without --resume"
                )
            name = _latest(root)
        self.path = root / name

        # The checksum covers all of the metadata, so a file that was cut off or edited is noticed here. One that was
        # written by another program may have the right checksum, so nothing in it is believed before it is checked.
        metadata = self.path / "metadata.json"
        why = ""
        try:
            record = parse_json(_read_regular(metadata, MAX_METADATA), any_float=True)
            checksum = record.pop("checksum")
            intact = checksum == _digest(json.dumps(record).encode())
            if intact:
                _Metadata.model_validate(record).check_sizes()
        except WrongValue as error:
            why = f" ({error})"
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            intact = False
        if why or not intact:
            raise UsageError(
                f"checkpoint {quoted_path(self.path)}: its file 'metadata.json', which lists all tensors, is missing or"
                f" damaged{why}; {self.remedy}"
            )

        self.step: int = record["step"]
        self.state: dict[str, Any] = record["state"]
        self.files: dict[str, int] = record["files"]
        self.tensors: dict[str, Any] = record["tensors"]
        self._checked: set[str] = set()  # files that are as long as they must be

    @property
    def remedy(self) -> str:
        """What a user can do where this checkpoint is damaged, for error messages: the newest one before it."""
        older = [name for name in complete_checkpoints(self.path.parent) if name < self.path.name]
        if not older:
            return "there is no older checkpoint next to it, so train anew in another --save directory"
        return f"write {older[-1]} into {quoted_path(self.path.parent / 'latest')} to use that one"

    def expect(self, name: str, shape: Sequence[int], dtype: str | None = None) -> None:
        """Raise UsageError unless tensor `name` is there with this shape, and with this dtype when one is given."""
        entry = self._entry(name)
        if (entry["shape"], entry["dtype"]) != (list(shape), dtype or entry["dtype"]):
            raise UsageError(
                f"checkpoint {quoted_path(self.path)}: tensor {quoted(name)} is {entry['dtype']}{entry['shape']}; the"
                f" model has {dtype or ''}{list(shape)}; use the model that was saved"
            )

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self.tensors:
            raise UsageError(
                f"checkpoint {quoted_path(self.path)} has no tensor {quoted(name)}{nearest(name, self.tensors)}; "
                "Checkpoint.tensors lists what it has"
            )
        return self.tensors[name]  # type: ignore[no-any-return]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read elements [start, stop) of tensor `name` in C order, as a new 1-D array."""
        entry = self._entry(name)
        size = prod(entry["shape"])
        stop = size if stop is None else stop
        if not 0 <= start <= stop <= size:
            raise UsageError(
                f"checkpoint {quoted_path(self.path)}: tensor {quoted(name)} has elements 0 to {size}, not {start}"
                f" to {stop}"
            )

        # The files have the bytes that the metadata promise: a tensor is never larger than what is on disk.
        for file in {piece["file"] for piece in entry["pieces"]} - self._checked:
            self._check_file(file, name)
            self._checked.add(file)
        result = np.empty(stop - start, named_dtype(entry["dtype"]))
        missing = np.ones(result.size, bool)

        # Only shards that overlap with the range are read from disk.
        for piece in entry["pieces"]:
            place = _indices(piece, entry["shape"])
            if isinstance(place, slice):
                first, last = max(place.start, start), min(place.stop, stop)
                if first < last:
                    mine = slice(first - start, last - start)
                    values = self._shard(name, piece, place.stop - place.start)
                    result[mine], missing[mine] = values[first - place.start : last - place.start], False
            else:
                wanted = (place >= start) & (place < stop)
                if wanted.any():
                    mine = place[wanted] - start
                    result[mine], missing[mine] = self._shard(name, piece, place.size)[wanted], False

        # As many elements as the tensor has, but some twice: the others would be whatever is in the memory.
        if missing.any():
            raise UsageError(
                f"checkpoint {quoted_path(self.path)}: element {start + int(missing.argmax())} of tensor {quoted(name)}"
                f" is in no shard; {self.remedy}"
            )
        return result

    def tensor(self, name: str) -> np.ndarray:
        """Read the whole tensor in its shape."""
        values = self.read(name)
        return values.reshape(self.tensors[name]["shape"])

    def _check_file(self, file: str, name: str) -> None:
        """Raise UsageError when a file is missing, or is not as long as the metadata say. name: a tensor in it."""
        path = self.path / file
        where = f"checkpoint {quoted_path(self.path)}: file {quoted(file)}, which holds tensor {quoted(name)},"
        if not path.is_file():
            raise UsageError(f"{where} is missing; copy the whole directory, or {self.remedy}")
        if path.stat().st_size != self.files[file]:
            raise UsageError(
                f"{where} has {path.stat().st_size} B instead of {self.files[file]}; copy it again, or {self.remedy}"
            )

    def _shard(self, name: str, piece: dict[str, Any], size: int) -> np.ndarray:
        """Return the `size` elements of a shard, 1-D; UsageError when they are not what was written."""
        from safetensors import SafetensorError, safe_open

        # The file's header, the tensor's size and dtype, and its checksum are checked, in this order.
        where = f"checkpoint {quoted_path(self.path)}: file {quoted(piece['file'])}, which holds tensor {quoted(name)},"
        try:
            with safe_open(self.path / piece["file"], framework="numpy") as file:
                kept, array = piece.get("kept"), np.zeros(0, named_dtype(self.tensors[name]["dtype"]))
                if kept != 0:
                    array = file.get_tensor(piece["key"])
                if kept is not None and array.size != kept:
                    raise ValueError(f"it has {array.size} values and not {kept}")
                if kept is not None:
                    array = _expanded(file.get_tensor(f"{piece['key']}.mask"), array, size)
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(f"{where} is damaged ({reason(error)}); {self.remedy}") from None
        if array.size != size or str(array.dtype) != self.tensors[name]["dtype"]:
            raise UsageError(
                f"{where} is damaged: it has {array.size} elements of {array.dtype} instead of {size} of"
                f" {self.tensors[name]['dtype']}; {self.remedy}"
            )
        if _checksum(array) != piece["checksum"]:
            raise UsageError(f"{where} is damaged: the tensor's checksum differs; {self.remedy}")
        return array.reshape(-1)
