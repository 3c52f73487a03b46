"""CUDA is named, and the CPU is used: programs that look for GPUs run on simulated ranks without one.

A device "cuda", "cuda:1" or 1 means the memory of the rank. `torch.cuda` and `torch.accelerator` answer the program
that there are as many GPUs as ranks, and answer torch's own code that there is none, so that it takes its way on the
CPU. What only waits or counts on a GPU (streams, events, memory) does nothing.

    program    tensor.to("cuda:1") ──▶ CpuForCuda ──▶ tensor.to("cpu")      torch.cuda.device_count() ──▶ ranks
    torch                                                                   torch.cuda.device_count() ──▶ 0

Proved by: tests/torch_ranks/test_cuda.py
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from minidist.comm.call_site import CallSite, call_site
from minidist.core.base.errors import UsageError
from minidist.debug.torch_ranks import sync_batch_norm
from minidist.debug.torch_ranks.isolation import Changes, of_program, replaced, when_imported
from minidist.debug.torch_ranks.rank_thread import current_rank, in_rank

CPU, Device = torch.device("cpu"), torch.device
TO_HOST = (torch.Tensor.cpu, torch.Tensor.to)
POSITIONAL = {torch.Tensor.to: 1, torch.as_tensor: 2}  # the place of a device among the arguments
NOTHING = (
    *("empty_cache", "init", "ipc_collect", "manual_seed", "manual_seed_all", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats", "seed", "seed_all"),
    *("set_per_process_memory_fraction", "set_rng_state", "set_rng_state_all", "set_stream"),
)
ZERO = (
    *("max_memory_allocated", "max_memory_cached", "max_memory_reserved", "memory_allocated", "memory_reserved"),
    "utilization",
)
YES = ("is_available", "is_bf16_supported", "is_initialized")
# What torch's own code asks to find out where it runs. It asks the others for a device that the program has named.
QUESTIONS = frozenset({"current_accelerator", "device_count", "get_device_properties", *YES})
GRAPHS = ("CUDAGraph", "graph", "make_graphed_callables")


class CudaOnCpu:
    """What a run with `--cuda cpu` knows. devices: how many GPUs the program sees. first_use: where it first names one.

    A rank's current device is kept by rank.
    """

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.first_use: CallSite | None = None
        self.current: dict[Any, int] = {}

    def note(self) -> None:
        """Keep the line at which a program first names CUDA."""
        if self.first_use is None:
            self.first_use = call_site(sys._getframe(1))

    def on_cpu(self, device: Any) -> Any:
        """Return the CPU for a CUDA device, however it is written; anything else as it is."""
        is_index = isinstance(device, int) and not isinstance(device, bool)
        if is_index or (isinstance(device, str | Device) and str(device).partition(":")[0] == "cuda"):
            self.note()
            return CPU
        return device

    def set_device(self, device: Any) -> None:
        """Keep a rank's current device."""
        self.note()
        index = Device(device).index if isinstance(device, str) else getattr(device, "index", device)
        if index is not None and not 0 <= index < self.devices:
            raise UsageError(
                f"rank {current_rank().comm.rank}: set_device({device}) at {call_site(sys._getframe(1))}, and the"
                f" program sees {self.devices} devices, one for each rank; raise --ranks"
            )
        self.current[current_rank()] = index or 0

    def current_device(self) -> int:
        """Return the index of a rank's current device."""
        return self.current.get(current_rank(), 0)


class CpuForCuda(TorchFunctionMode):
    """Lets torch's functions use the CPU where they are told a CUDA device, in the thread that has entered it."""

    def __init__(self, run: CudaOnCpu) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, run = kwargs or {}, self.run
        # These have a meaning for a GPU's memory only.
        if function is torch.Tensor.cuda:
            run.note()
            return args[0]
        if function is torch.Tensor.pin_memory:
            return args[0]

        if run.first_use is not None and function in TO_HOST and of_program() and names_host(function, args, kwargs):
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            return torch.Tensor.to(args[0], CPU, *args[2:], **{**kwargs, "copy": True})

        # Any other function, with the CPU for a device.
        place = POSITIONAL.get(function)
        if place is not None and len(args) > place:
            args = (*args[:place], run.on_cpu(args[place]), *args[place + 1 :])
        if "device" in kwargs:
            kwargs["device"] = run.on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)


def synchronize(*_: Any, **__: Any) -> None:
    """Wait for the rank's operations: on a GPU this waits for those of NCCL, too, which no wait() has to follow."""
    if in_rank():
        for work in current_rank().open_works:
            work.wait()


def names_host(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a tensor goes to the CPU: from a GPU it is a copy, which leaves the original as it is."""
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    return function is torch.Tensor.cpu or target == "cpu" or (isinstance(target, Device) and target == CPU)


def nothing(*_: Any, **__: Any) -> None:
    """Take the place of what only waits, counts or marks on a GPU."""


class Stream:
    """Takes the place of a CUDA stream: work is done when it has been called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = Device("cuda", 0), 0, 0

    synchronize = wait_event = wait_stream = wait = record = nothing

    def query(self) -> bool:
        """Return that all is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return an event of now."""
        event = Event() if event is None else event
        event.record()
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event(Stream):
    """Takes the place of a CUDA event: the time at which it was recorded."""

    time = 0.0

    def record(self, *_: Any) -> None:
        """Keep the time."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds until another event."""
        return 1_000 * (end.time - self.time)


def standing_for(real: Any, make: Callable[..., Any]) -> Any:
    """Return what takes the place of the class `real`, which cannot be derived from, and makes its instances anew.

    What is an instance of the one is one of the other.
    """

    class Standing(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real)

        def __subclasscheck__(cls, other: Any) -> bool:
            return issubclass(other, real)

    return Standing(real.__name__, (), {"__module__": "torch", "__doc__": real.__doc__})


def answers(run: CudaOnCpu) -> dict[str, Callable[..., Any]]:
    """Return what `torch.cuda` and `torch.accelerator` answer to a program, by the name of the function."""

    def no_graph(*_: Any, **__: Any) -> Any:
        raise UsageError(
            f"rank {current_rank().comm.rank}: a CUDA graph at {call_site(sys._getframe(1))} cannot be captured on the"
            " CPU; run without it, or with --cuda real on a machine with a GPU"
        )

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 34
    properties = {"name": "CPU", "total_memory": memory, "major": 0, "minor": 0, "multi_processor_count": 1}
    return {
        **dict.fromkeys(NOTHING, nothing),
        **dict.fromkeys(ZERO, lambda *_, **__: 0),
        **dict.fromkeys(GRAPHS, no_graph),
        "synchronize": synchronize,
        **dict.fromkeys(YES, lambda *_, **__: True),
        **dict.fromkeys(("set_device", "set_device_index"), run.set_device),
        **dict.fromkeys(("current_device", "current_device_index"), run.current_device),
        **dict.fromkeys(("device", "device_index", "stream"), lambda *_: nullcontext()),
        **dict.fromkeys(("Stream", "ExternalStream", "current_stream", "default_stream"), Stream),
        "Event": Event,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: run.devices,
        "current_accelerator": lambda *_, **__: Device("cuda"),
        "get_device_name": lambda *_: "CPU",
        "get_device_capability": lambda *_: (0, 0),
        "get_device_properties": lambda *_: SimpleNamespace(**properties),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "mem_get_info": lambda *_: (memory, memory),
        "memory_stats": lambda *_, **__: {},
        "memory_summary": lambda *_, **__: "",
    }


def answering(
    run: CudaOnCpu, original: Any, answer: Callable[..., Any], is_question: bool = True
) -> Callable[..., Any]:
    """Return a function that answers a program. Torch's own questions and other threads are left to the original."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if of_program():
            run.note()
        elif is_question or not in_rank():
            return original(*args, **kwargs)
        return answer(*args, **kwargs)

    return function


def replacements(run: CudaOnCpu) -> Changes:
    """Yield (object, name, what takes the place) for all of torch that is told a device."""

    def to_cuda(module: Any, device: Any = None, non_blocking: bool = False) -> Any:
        run.note()
        return module

    found = answers(run)
    for module in (torch.cuda, torch.accelerator):
        for name, answer in found.items():
            original = getattr(module, name, None)
            is_question = name in QUESTIONS
            yield module, name, answer if isinstance(original, type) else answering(run, original, answer, is_question)
    for name in ("range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, nothing
    yield torch.cuda.nvtx, "range", lambda *_, **__: nullcontext()
    yield dist, "is_nccl_available", answering(run, dist.is_nccl_available, lambda: True)

    # Classes and functions with a device among their arguments: (object, name, arguments by name or place).
    yield (
        torch,
        "device",
        standing_for(Device, lambda *a, **k: Device("cuda", a[0]) if _is_index(a, k) else Device(*a, **k)),
    )
    generator = torch.Generator
    yield torch, "Generator", standing_for(generator, lambda device="cpu": generator(device=run.on_cpu(device)))
    for holder, name, device, place in (
        (DeviceContext, "__init__", "device", 1),
        (DeviceMesh, "__init__", "device_type", 1),
        (torch.amp.autocast_mode.autocast, "__init__", "device_type", 1),
        (nn.Module, "to", "device", 1),
        (nn.Module, "to_empty", "device", 1),
    ):
        yield holder, name, with_cpu(run, getattr(holder, name), device, place)
    for kind in (nn.Module, torch.storage._StorageBase):
        yield kind, "cuda", to_cuda
    yield nn.SyncBatchNorm, "forward", sync_batch_norm.forward
    for kernel in sync_batch_norm.KERNELS:
        yield torch, kernel.__name__, kernel

    yield torch.Tensor, "record_stream", nothing

    # What chooses a device of the process.
    ddp = nn.parallel.DistributedDataParallel
    yield ddp, "__init__", without(run, ddp.__init__, "device_ids", "output_device")
    yield ddp, "_check_comm_hook", _check_comm_hook(ddp._check_comm_hook)
    yield ddp, "_passing_sync_batchnorm_handle", nothing  # which refuses the CPU
    yield torch, "load", _load(torch.load)
    for module in (dist, dist.distributed_c10d):
        yield module, "init_process_group", without(run, dist.init_process_group, "device_id")


def _is_index(args: Any, kwargs: Any) -> bool:
    return len(args) == 1 and not kwargs and isinstance(args[0], int)


def with_cpu(run: CudaOnCpu, original: Any, name: str, place: int) -> Callable[..., Any]:
    """Return a function that is given the CPU for a CUDA device, at a place of its arguments or by name."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if in_rank():
            if len(args) > place:
                args = (*args[:place], *(_same_kind(run, args[place]),), *args[place + 1 :])
            if name in kwargs:
                kwargs[name] = _same_kind(run, kwargs[name])
        return original(*args, **kwargs)

    return function


def _same_kind(run: CudaOnCpu, device: Any) -> Any:
    on_cpu = run.on_cpu(device)
    return "cpu" if on_cpu is CPU and isinstance(device, str) else on_cpu


def without(run: CudaOnCpu, original: Any, *names: str) -> Callable[..., Any]:
    """Return a function that is not given the arguments `names` in a rank."""

    def function(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name, None) for name in names] if in_rank() else []
        if any(value is not None for value in given):
            run.note()
        return original(*args, **kwargs)

    return function


def _load(original: Any) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if in_rank() and not callable(map_location) and str(map_location) != "meta":
            map_location = "cpu"
        return original(f, map_location, *args, **kwargs)

    return load


def _check_comm_hook(original: Any) -> Callable[..., Any]:
    def check(model: Any, hook: Any) -> None:
        try:
            original(model, hook)
        except TypeError as error:
            if "BF16" not in error.args[0]:  # it needs a GPU's library
                raise

    return check


def _fsdp(module: Any) -> Changes:
    """Let FullyShardedDataParallel be told the CPU, whatever device its program names."""
    original = module.FullyShardedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if in_rank():
            kwargs["device_id"] = CPU
        original(self, *args, **kwargs)

    yield module.FullyShardedDataParallel, "__init__", init


@contextmanager
def cuda_on_cpu(devices: int) -> Iterator[CudaOnCpu]:
    """Let programs of ranks name CUDA devices inside the block. A rank's thread enters `CpuForCuda` in addition."""
    run = CudaOnCpu(devices)
    fsdp = when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", _fsdp)
    with replaced(list(replacements(run))), fsdp:
        yield run
