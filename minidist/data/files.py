"""The user's own data: text, tokens, MNIST's and CIFAR's files, a NumPy archive. Every defect is one sentence.

Texts and tokens are memory-mapped, so a file may be larger than the memory.

Proved by: tests/data/test_datasets.py
"""

import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.cache import cached
from minidist.base.errors import UsageError, nearest, quoted, quoted_path, reason
from minidist.base.read_file import check_path
from minidist.data.datasets import SampleDataset, TokenDataset

TOKEN_DTYPES = {".u8": "<u1", ".u16": "<u2", ".u32": "<u4", ".i32": "<i4", ".i64": "<i8", ".bin": "<u2"}
MAX_TOKEN = 2**31 - 1  # a token or a class; each is a row of a matrix
MAX_DIMS = 8  # of an idx file
CIFAR_PIXELS = 3 * 32 * 32
MIN_UNPACKED, MAX_RATIO = 64_000_000, 200  # bytes, and times the packed size, that a packed file may have
_IDX_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def _existing(kind: str, path: str) -> Path:
    """Return the path of a file with something in it; a UsageError says what else it is."""
    # The first thing that is wrong is reported, with what would be right.
    file = _expanded(kind, path)
    path = quoted_path(path, marks=False)
    if file.is_dir():
        raise UsageError(f"--data {kind}:{path} is a folder; name a file in it")
    if not file.exists():
        siblings = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        raise UsageError(f"--data {kind}:{path} does not exist{nearest(file.name, siblings)}; name an existing file")
    if file.stat().st_size == 0:
        raise UsageError(f"--data {kind}:{path} is empty; name a file with something in it")
    return file


def _expanded(kind: str, path: str) -> Path:
    """Return the path with the home folder in place of `~`."""
    file = check_path(path, f"--data {kind}:")
    try:
        return file.expanduser()
    except RuntimeError:
        user = quoted(file.parts[0], marks=False)
        raise UsageError(
            f"--data {kind}:{quoted_path(path, marks=False)}: this machine has no user {user}; write the path in full"
        ) from None


def text_file(path: str) -> TokenDataset:
    """Return the bytes of any file, vocabulary 256. A .gz file is unpacked once, into the cache (see cache.py)."""
    # The bytes are the tokens, so a file that is not packed needs no preparation.
    file = _existing("text", path)
    if file.suffix == ".gz":
        return TokenDataset(f"text:{path}", cached(file, "text", lambda: np.frombuffer(_unpacked(file), np.uint8)), 256)
    return TokenDataset(f"text:{path}", np.memmap(file, np.uint8, mode="r"), 256)


def _unpacked(file: Path) -> bytes:
    # Real data are at most a few dozen times as large as their packed form; a file made to fill the memory, a thousand.
    import gzip

    most = max(MIN_UNPACKED, MAX_RATIO * file.stat().st_size)
    try:
        with gzip.open(file) as packed:
            content = packed.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"--data file {file} cannot be read: {reason(error)}; fetch it again") from None
    if len(content) > most:
        raise UsageError(
            f"--data file {file} is larger than {most:,} bytes, {MAX_RATIO} times its packed size; use gunzip"
        )
    return content


def token_file(path: str) -> TokenDataset:
    """Return a flat file of token numbers. The vocabulary is the largest number, plus one.

    The dtype is the suffix's: .u8 .u16 .u32 .i32 .i64, little-endian, no header, and .bin is .u16 (as nanoGPT writes
    it); a .npy file says its own dtype in its header.
    """
    file, name = _existing("tokens", path), f"tokens:{path}"

    # The dtype comes from the header or the suffix.
    if file.suffix == ".npy":
        try:
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy has an error of another class for each part of a damaged header
            raise UsageError(
                f"--data {name} is not a NumPy array file: {reason(error)}; write it with numpy.save"
            ) from None
        if not isinstance(tokens, np.ndarray):
            raise UsageError(f"--data {name} is a NumPy archive, not an array; write it with numpy.save")
    elif file.suffix in TOKEN_DTYPES:
        dtype = np.dtype(TOKEN_DTYPES[file.suffix])
        if file.stat().st_size % dtype.itemsize:
            raise UsageError(
                f"--data {name} has {file.stat().st_size} bytes, not a multiple of the {dtype.itemsize} of a "
                f"{file.suffix} token; give it the suffix of its dtype, one of {' '.join(TOKEN_DTYPES)} .npy"
            )
        tokens = np.memmap(file, dtype, mode="r")
    else:
        raise UsageError(
            f"--data {name}: the suffix {quoted(file.suffix)} names no dtype; "
            f"rename it to one of {' '.join(TOKEN_DTYPES)} .npy"
        )

    # A model looks tokens up in a table, so they must be row numbers.
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size == 0:
        raise UsageError(f"--data {name} is {tokens.shape} {tokens.dtype}; tokens are whole numbers in one dimension")
    if int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN:
        wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise UsageError(f"--data {name} holds the token {wrong}; tokens are numbers from 0 on, to {MAX_TOKEN:,}")
    return TokenDataset(name, tokens, int(tokens.max()) + 1)


def idx_folder(path: str) -> SampleDataset:
    """Return MNIST or a similar set: train-images-idx3-ubyte and train-labels-idx1-ubyte, each as it is or with .gz.

    The format (Y. LeCun, C. Cortes, C. Burges, "The MNIST database", file formats): two zero bytes, a dtype, the number
    of dims, then the dims and the data, all big-endian.
    """
    # Images, then labels.
    folder, arrays = _expanded("idx", path), []
    if not folder.is_dir():
        raise UsageError(f"--data idx:{path} is not a folder; name the one with train-images-idx3-ubyte in it")
    for stem in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        found = [folder / name for name in (stem, stem + ".gz") if (folder / name).exists()]
        if not found:
            raise UsageError(f"--data idx:{path} has no {stem} or {stem}.gz; put both MNIST files in it")
        arrays.append(_read_idx(found[0]))
    return _samples(f"idx:{path}", *arrays)


def _read_idx(file: Path) -> np.ndarray:
    if file.suffix == ".gz":
        return cached(file, "idx", lambda: _parse_idx(file, _unpacked(file)))
    try:
        return _parse_idx(file, file.read_bytes())
    except OSError as error:
        raise UsageError(f"--data file {file} cannot be read: {reason(error)}; fetch it again") from None


def _parse_idx(file: Path, content: bytes) -> np.ndarray:
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_DTYPES:
        raise UsageError(f"--data file {file} does not begin like an idx file; fetch it again")

    # The header says the dtype and the dims; together they say how long the file must be.
    dims, dtype = content[3], np.dtype(_IDX_DTYPES[content[2]])
    if not 1 <= dims <= MAX_DIMS:
        raise UsageError(f"--data file {file} has {dims} dims; images have 3 and labels 1, so fetch it again")
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
    expected = 4 + 4 * dims + dtype.itemsize * prod(shape)
    if len(content) != expected:
        raise UsageError(f"--data file {file} has {len(content)} bytes, its header says {expected}; fetch it again")
    return np.frombuffer(content, dtype, offset=4 + 4 * dims).reshape(shape)


def cifar_folder(path: str) -> SampleDataset:
    """Return the training images of CIFAR-10 or CIFAR-100, (n, 3, 32, 32), from the folder of its *binary* version.

    The format (A. Krizhevsky, "The CIFAR-10 dataset"): data_batch_1.bin to data_batch_5.bin, per image a label and
    3,072 pixels; of CIFAR-100 train.bin, per image a coarse label, the label and the pixels. All red pixels come
    first, then the green and the blue ones.
    """
    folder = _expanded("cifar", path)
    shown = quoted_path(path, marks=False)
    if not folder.is_dir():
        raise UsageError(f"--data cifar:{shown} is not a folder; name the one with data_batch_1.bin in it")
    files = sorted(folder.glob("data_batch_*.bin")) or sorted(folder.glob("train.bin"))
    if not files:
        raise UsageError(f"--data cifar:{shown} has no data_batch_1.bin and no train.bin; unpack the binary version")

    # Rows of labels and pixels; the last label is the one that is learned.
    labels, parts = 2 if files[0].name == "train.bin" else 1, []
    for file in files:
        try:
            content = np.fromfile(file, np.uint8)
        except OSError as error:
            raise UsageError(f"--data file {file} cannot be read: {reason(error)}; fetch it again") from None
        if content.size == 0 or content.size % (labels + CIFAR_PIXELS):
            raise UsageError(
                f"--data file {file} has {content.size} bytes, not a multiple of the {labels + CIFAR_PIXELS} of an"
                " image; fetch it again"
            )
        parts.append(content.reshape(-1, labels + CIFAR_PIXELS))
    rows = np.concatenate(parts)
    return _samples(f"cifar:{path}", rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1])


def npz_file(path: str) -> SampleDataset:
    """Return the arrays `x`, (n, ...), and `y`, (n,), of a NumPy archive; or `x_train` and `y_train`, as in Keras."""
    import zipfile

    file = _existing("npz", path)
    if not zipfile.is_zipfile(file):
        raise UsageError(f"--data npz:{path} is not a NumPy archive; write it with numpy.savez")
    try:
        with zipfile.ZipFile(file) as packed, np.load(file, allow_pickle=False) as archive:
            # Keras's names first: such an archive may hold x_test as well.
            for x, y in (("x_train", "y_train"), ("x", "y")):
                if x in archive and y in archive:
                    _check_packed(packed, x, file)
                    _check_packed(packed, y, file)
                    return _samples(f"npz:{path}", archive[x], archive[y])
            names = quoted(", ".join(archive), marks=False)
    except UsageError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise a dozen classes of errors for a damaged archive
        raise UsageError(
            f"--data npz:{path} is damaged, or its arrays are not of numbers: {reason(error)}; use numpy.savez"
        ) from None
    raise UsageError(f"--data npz:{path} holds {names}; it needs x and y, or x_train and y_train")


def _check_packed(packed: Any, name: str, file: Path) -> None:
    """Refuse an array before it is unpacked, when it or its header asks for much more than the file can hold.

    packed: a `zipfile.ZipFile`.
    """
    member = packed.getinfo(name if name in packed.namelist() else f"{name}.npy")
    with packed.open(member) as content:
        version = np.lib.format.read_magic(content)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(content)
        header = content.tell()
    size = prod(shape) * dtype.itemsize
    if min((0, *shape)) < 0 or header + size != member.file_size:
        raise ValueError(f"{name} has {member.file_size} bytes and its header says {header + size}")
    if size > max(MIN_UNPACKED, MAX_RATIO * file.stat().st_size):
        raise ValueError(f"{name} would have {size:,} bytes, more than {MAX_RATIO} times the file's")


def _samples(name: str, inputs: np.ndarray, targets: np.ndarray) -> SampleDataset:
    if targets.ndim != 1 or inputs.ndim < 2 or len(inputs) != len(targets) or len(inputs) == 0:
        raise UsageError(
            f"--data {name} has inputs {inputs.shape} and labels {targets.shape}; it needs (n, ...) and (n,), n above 0"
        )
    if inputs.dtype.kind not in "iubf":
        raise UsageError(f"--data {name} has inputs of {inputs.dtype}; inputs are numbers")
    if targets.dtype.kind in "iu" and int(targets.max()) > MAX_TOKEN:
        raise UsageError(f"--data {name} has the label {int(targets.max())}; labels are below {MAX_TOKEN + 1:,}")
    if targets.dtype.kind not in "iu" or int(targets.min()) < 0:
        raise UsageError(f"--data {name} has labels of {targets.dtype}; labels are whole numbers from 0 on")
    return SampleDataset(name, inputs, targets, int(targets.max()) + 1)
