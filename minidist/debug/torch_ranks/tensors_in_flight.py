"""Tensors of operations that have begun and not been waited for: who writes or reads one meanwhile is told, with lines.

    work = dist.irecv(t, 0)      ─┐  t belongs to the operation: what it holds, and what a write does, is undefined
    seen = t.clone()              │  a read: the class of t is InFlightTensor until the wait, which sees what uses it
    t.fill_(0)                    │  a write: the bytes of t are not those of the beginning, at the wait
    work.wait()                  ─┘

Here a tensor is sent as it was when the operation began, and what is received is written into it by the wait, so that a
run has the same numbers whatever the order of its ranks; and it goes on, so that all races of a program are found.
A race that is found a second time, in a loop, ends the run.

A read is not seen through another tensor of the same memory that was made before, such as `p.grad.data` or an array of
NumPy's, nor in C++ (autograd's formulas), nor one by torch.distributed itself. A write is seen in all of these.

Proved by: tests/torch_ranks/test_tensors_in_flight.py
"""

import os
import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from minidist.comm.buffers import checksum
from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.errors import BufferReuseError

INTERNAL = f"{os.sep}torch{os.sep}distributed{os.sep}"
GUARD = "_minidist_operation"  # the attribute of an InFlightTensor
# What tells the form of a tensor, and reads no element.
FORM = {"__get__", "__len__", "__hash__", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size"}
FORM |= {"is_contiguous", "data_ptr", "storage_offset", "untyped_storage", "is_floating_point", "is_complex"}
FORM |= {"is_signed", "get_device", "is_shared", "is_same_size"}
FORM |= {"register_hook", "requires_grad_", "__set__", "record_stream"}
WRITES = re.compile(r"\w*[^_]_|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")


class Races:
    """The races of a run: sentences, each once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        """Keep a race; raise BufferReuseError when it has been found before."""
        if sentence in self.sentences:
            self.check()
        self.sentences.append(sentence)

    def add_to(self, error: Exception) -> None:
        """Add the races to an error of the run, which they may have led to; each once."""
        if not isinstance(error, BufferReuseError):
            for sentence in self.sentences:
                if sentence not in getattr(error, "__notes__", ()):
                    error.add_note(sentence)

    def check(self) -> None:
        """Raise BufferReuseError with all races that have been found."""
        if self.sentences:
            raise BufferReuseError("\n  ".join(self.sentences))


class Operation:
    """An operation that has begun. sent: tensors that it reads; written: those that its wait writes."""

    def __init__(
        self, rank: int, races: Races, what: str, sent: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        self.rank, self.races, self.what = rank, races, what
        self.site = call_site(sys._getframe(1))
        self.watched: list[torch.Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            tensors = {id(tensor): tensor for tensor in (*sent, *written)}.values()
            for tensor in tensors:
                if type(tensor) is InFlightTensor:
                    getattr(tensor, GUARD).used(what, self.site)
            self.bytes = [(tensor, *_fingerprint(tensor)) for tensor in tensors]
        for tensor in written:
            self.watch(tensor)

    def describe(self) -> str:
        """Return the operation and its line."""
        return f"{self.what} at {self.site}"

    def watch(self, tensor: Any) -> None:
        """See from now on what uses a tensor; a parameter and other classes of tensors stay what they are."""
        if type(tensor) is torch.Tensor:
            tensor.__class__ = InFlightTensor
            setattr(tensor, GUARD, self)
            self.watched.append(tensor)

    def end(self) -> None:
        """Note a write, at the wait: the tensors are the program's again."""
        for tensor in self.watched:
            tensor.__class__ = torch.Tensor
            delattr(tensor, GUARD)
        self.watched.clear()
        site = call_site(sys._getframe(1), NOWHERE)
        now = f"its wait() at {site}" if site is not NOWHERE else "the end of the program, which does not wait for it"
        for tensor, size, before in self.bytes:
            # Memory that has been given back cannot be looked at.
            with torch._C.DisableTorchFunctionSubclass():
                same = tensor.untyped_storage().nbytes() != size or _fingerprint(tensor)[1] == before
            if not same:
                self.races.add(
                    f"rank {self.rank}: the tensor of its {self.describe()} has changed between then and {now}; write"
                    " into it after wait(), or pass a copy"
                )
                break
        self.bytes.clear()

    def used(self, by: str, site: CallSite, written: bool = False) -> None:
        """Note that the program reads a tensor before the wait, or writes into it."""
        how = "changed" if written else "read"
        if written:  # the wait has nothing to add
            self.bytes.clear()
        self.races.add(
            f"rank {self.rank}: the tensor of its {self.describe()} is {how} by {by} at {site}, before wait(), and has"
            " the contents of before the operation; wait() first"
        )


def _views(result: Any, memory: dict[int, Any]) -> list[torch.Tensor]:
    """Return the tensors of a result when all of them lie in `memory`, which is by address; else []."""
    views = [t for t in _flat([result]) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    return views if all(t.untyped_storage().data_ptr() in memory for t in views) else []


class InFlightTensor(torch.Tensor):
    """A tensor that an operation writes: whatever reads it before the wait is a race."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and note that it reads the tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", str(func))
            tensors = [t for t in _flat([*args, *(kwargs or {}).values()]) if type(t) is InFlightTensor]
            operations = {id(t): getattr(t, GUARD) for t in tensors}
            memory = {t.untyped_storage().data_ptr(): t for t in tensors}
            result = func(*args, **(kwargs or {}))
            site = None if name in FORM else _line_of_program(sys._getframe(1))
            if site is None:
                return result
            # A view reads nothing, and whoever uses it uses the tensor.
            writes = WRITES.fullmatch(name) is not None
            views = [] if writes else _views(result, memory)
            if views:
                for view in views:
                    operations[id(memory[view.untyped_storage().data_ptr()])].watch(view)
                return result
            for tensor in tensors:
                operations[id(tensor)].used(name, site, writes and tensor is args[0])
            return result


def _flat(values: Sequence[Any]) -> list[Any]:
    """Return the values, those of lists and tuples among them each by itself."""
    return [part for value in values for part in (value if isinstance(value, (list, tuple)) else (value,))]


def _line_of_program(frame: FrameType | None) -> CallSite | None:
    """Return the line of the program that led here; None where torch.distributed is on the way, which waits itself."""
    site = call_site(frame, NOWHERE)
    while frame is not None and frame.f_code.co_filename != site.filename:
        if INTERNAL in frame.f_code.co_filename:
            return None
        frame = frame.f_back
    return None if frame is None else site


def _fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of the memory that a tensor lies in, and the checksum of its elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes, checksum(np.from_dlpack(flat.view(torch.uint8))) if flat.numel() else 0
