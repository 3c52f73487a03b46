"""The files of a dry run: none. What each of them would hold is counted.

A safetensors file is 8 bytes, a header in JSON that names dtype, shape and place of each tensor, filled up with spaces
to a multiple of 8 bytes, and the values of the tensors, the widest dtypes first.

    8 B   {"3":{"dtype":"F32","shape":[4,6],"data_offsets":[0,96]},"0":{...}}   96 B of values, ...

Source of the format: https://github.com/huggingface/safetensors, README, "Format".
Proved by: tests/train/test_dry_run.py
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minidist.job.checkpoint.storage import Storage

# The format's names of dtypes, in the order in which it sorts them.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}


class DryStorage(Storage):
    """Writes nothing, and counts the bytes of files of tensors."""

    has_files = False

    @contextmanager
    def locked(self, directory: Path) -> Iterator[None]:
        yield

    def make(self, path: Path) -> None: ...

    def write(self, path: Path, data: bytes) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def discard(self, path: Path) -> None: ...

    def write_tensors(self, path: Path, tensors: dict[str, Any]) -> int:
        """Return the bytes of a file of tensors, which is not written."""
        self.tensor_bytes = file_bytes(tensors)
        return self.tensor_bytes


def file_bytes(tensors: dict[str, Any]) -> int:
    """Return the bytes of a safetensors file of arrays; only the arrays' shapes and dtypes are read."""
    if not tensors:
        return 0
    ranks = {name: rank for rank, name in enumerate(DTYPES)}
    header: dict[str, Any] = {}
    end = 0
    for name, array in sorted(tensors.items(), key=lambda item: (-ranks[item[1].dtype.name], item[0])):
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, end]}
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + end
