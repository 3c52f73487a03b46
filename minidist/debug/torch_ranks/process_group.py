"""torch's process group on a simulated world: every collective of torch becomes one of ours, made of send and recv.

    dist.all_reduce(tensor)  ──▶  allreduce([tensor])  ──▶  rank.call(all_reduce(comm, array))  ──▶  tensor

Tensors are copied into arrays when an operation begins and back when it is waited for. An operation with async_op=True
runs on the stream of its group, as ours do; a send or a receive is posted at once, so that messages match in the order
in which they are posted, and not in that of the waits.

Proved by: tests/torch_ranks/test_program.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from minidist import collectives
from minidist.comm.call_log import Passed
from minidist.comm.communicator import CheckedComm
from minidist.core.base.errors import UsageError
from minidist.core.comm import ANY
from minidist.debug.torch_ranks.isolation import BACKEND
from minidist.debug.torch_ranks.rank_thread import RankThread, current_rank
from minidist.debug.torch_ranks.split_sizes import elements, exchange_counts, list_counts
from minidist.debug.torch_ranks.tensors_in_flight import Operation

REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
Tensors = Sequence[torch.Tensor]


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a copy of a tensor's elements as a 1-D array; bfloat16 as ml_dtypes', other 8-bit floats as bytes.

    Not by `tensor.numpy()`, after which a program such as FSDP cannot resize the memory any more.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        return np.from_dlpack(flat.view(torch.int16)).view(ml_dtypes.bfloat16).copy()
    if flat.dtype == torch.bool or flat.dtype.itemsize == 1:
        return np.from_dlpack(flat.view(torch.uint8)).copy()
    if flat.dtype.is_complex:
        return np.from_dlpack(torch.view_as_real(flat).reshape(-1)).copy()
    return np.from_dlpack(flat).copy()


def put(array: np.ndarray, tensor: torch.Tensor) -> None:
    """Copy what `array_of` made, or a result of the same form, into a tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        flat = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    else:
        flat = torch.from_numpy(np.ascontiguousarray(array))
        if tensor.dtype.is_complex:
            flat = torch.view_as_complex(flat.reshape(-1, 2))
        elif flat.dtype != tensor.dtype:
            flat = flat.view(tensor.dtype)
    with torch.no_grad():
        tensor.detach().copy_(flat.reshape(tensor.shape))


def reduction_of(reduce_op: Any) -> str:
    """Return our name of a torch reduction; UsageError for one that we do not have."""
    for ours, name in REDUCTIONS.items():
        if reduce_op == ours:
            return name
    names = [name for name in ("BAND", "BOR", "BXOR", "PREMUL_SUM") if reduce_op == getattr(dist.ReduceOp, name)]
    raise UsageError(f"ReduceOp.{names[0] if names else reduce_op} is not simulated; use SUM, AVG, PRODUCT, MIN or MAX")


class SimulatedWork(dist._Work):
    """An operation that has begun. finish: waits for it in the rank's world and writes its tensors."""

    def __init__(self, rank: RankThread, finish: Callable[[], None], tensors: Tensors) -> None:
        super().__init__()
        self.rank, self.finish, self.tensors = rank, finish, list(tensors)
        self.operation: Operation | None = None  # that watches the tensors until the wait
        self.done = False
        self.source = -1  # of a receive: the rank of the group that sent

    def wait(self, timeout: Any = None) -> bool:
        if not self.done:
            self.done = True
            if self.operation is not None:
                self.operation.end()
            self.finish()
        return True

    def synchronize(self) -> None:
        """Block until the operation is done; on the CPU that is what waiting means."""
        self.wait()

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        """Return whether the operation has been waited for: one that fails ends the run."""
        return self.done

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation has written."""
        self.wait()
        return self.tensors

    def _source_rank(self) -> int:
        """Return the rank of the group from which a message has come."""
        return self.source

    def get_future(self) -> torch.futures.Future:
        """Return a future that is done: DistributedDataParallel would wait for it outside of Python."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.tensors)
        return future


class SimulatedProcessGroup(dist.ProcessGroup):
    """A process group of a simulated world. comm: its communicator."""

    def __init__(self, comm: CheckedComm, rank: RankThread) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm, self.thread = comm, rank

    # what torch asks of every group -----------------------------------------------------------------------------------

    def size(self) -> int:
        return self.comm.size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors this group takes."""
        return [torch.device("cpu")]

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def pg_name(self) -> str:
        return self.group_name

    def shutdown(self) -> None:
        """Nothing to do: the world ends with its run."""

    def abort(self) -> None:
        """Nothing to do: the world ends with its run."""

    def _start_coalescing(self, device: Any) -> None:
        """Nothing to do: operations of a block begin one after the other."""

    def _end_coalescing(self, device: Any) -> SimulatedWork:
        """Return a work that is done: each operation of the block has another work, which ends with the rank."""
        return self._work(lambda: None, ())

    # how an operation runs --------------------------------------------------------------------------------------------

    def _work(self, finish: Callable[[], None], tensors: Tensors, what: str = "", sent: Tensors = ()) -> SimulatedWork:
        """Return a work that writes `tensors`. what, sent: the operation, and the tensors that it reads."""
        work = SimulatedWork(self.thread, finish, tensors)
        world: Any = self.comm.world
        if what and world.check_buffers:
            work.operation = Operation(self.comm.members[self.comm.rank], self.thread.races, what, sent, tensors)
        # Those that have been waited for go, with their tensors.
        self.thread.open_works = [*(other for other in self.thread.open_works if not other.done), work]
        return work

    def _run(
        self,
        opts: Any,
        collective: Callable[..., Any],
        inputs: Tensors,
        outputs: Tensors,
        *arguments: Any,
        **keywords: Any,
    ) -> SimulatedWork:
        """Begin one of our collectives of the elements of `inputs`, which writes its result into `outputs`.

        inputs: none where this rank passes nothing; reports name them in place of our arrays.
        """
        arrays = [array_of(each) for each in inputs]
        array = np.concatenate(arrays) if len(arrays) > 1 else next(iter(arrays), None)

        def start(async_op: bool) -> Any:
            self.comm.passed = passed(inputs)
            try:
                return collective(self.comm, array, *arguments, async_op=async_op, **keywords)
            finally:
                self.comm.passed = None

        if not getattr(opts, "asyncOp", True):
            put_parts(self.thread.call(lambda: start(False)), outputs)
            return self._done(outputs)
        ours = self.thread.call(lambda: start(True))
        what = f"{ours.comm.operation.partition('/')[0]}{described(inputs)}"
        return self._work(lambda: put_parts(self.thread.call(ours.wait), outputs), outputs, what, inputs)

    def _done(self, tensors: Tensors = ()) -> SimulatedWork:
        """Return a work that has been waited for."""
        work = SimulatedWork(self.thread, lambda: None, tensors)
        work.done = True
        return work

    # collectives ------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Replace every rank's tensor by the reduction of all."""
        opts = dist.AllreduceOptions() if opts is None else opts
        return self._run(opts, collectives.all_reduce, tensors, tensors, reduction_of(opts.reduceOp))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        return self._all([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Give the root the reduction of all ranks' tensors."""
        return self._run(opts, collectives.reduce, tensors, tensors, opts.rootRank, reduction_of(opts.reduceOp))

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Replace every rank's tensor by the root's."""
        return self._run(opts, collectives.broadcast, tensors, tensors, opts.rootRank)

    def allgather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Give every rank the tensors of all, which may have other sizes on other ranks."""
        (outputs,) = output_tensors
        counts = [elements(output) for output in outputs]
        return self._run(opts, collectives.all_gather, input_tensors, outputs, counts=counts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Give every rank the tensors of all, one after the other in one tensor."""
        return self._run(opts, collectives.all_gather, [input], [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        works = [self.all_gather_single(out, each, opts) for out, each in zip(outputs, inputs, strict=True)]
        return self._all(works, outputs)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any = None
    ) -> SimulatedWork:
        """Give rank r the reduction of all ranks' r-th tensors."""
        (inputs,) = input_tensors
        return self._reduce_scatter(output_tensors, inputs, [elements(each) for each in inputs], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Give rank r the r-th part of the reduction of all ranks' tensors."""
        return self._reduce_scatter([output], [input], None, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        works = [self.reduce_scatter_single(out, each, opts) for out, each in zip(outputs, inputs, strict=True)]
        return self._all(works, outputs)

    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, counts: list[int] | None, opts: Any) -> SimulatedWork:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        op = reduction_of(opts.reduceOp)
        return self._run(opts, collectives.reduce_scatter, inputs, outputs, op, counts=counts)

    def gather(self, output_tensors: Sequence[Tensors], input_tensors: Tensors, opts: Any) -> SimulatedWork:
        """Give the root the tensors of all ranks."""
        outputs = output_tensors[0] if self.comm.rank == opts.rootRank else []
        return self._run(opts, collectives.gather, input_tensors, outputs, opts.rootRank)

    def scatter(self, output_tensors: Tensors, input_tensors: Sequence[Tensors], opts: Any) -> SimulatedWork:
        """Give rank r the root's r-th tensor."""
        inputs = input_tensors[0] if self.comm.rank == opts.rootRank else []
        out = np.empty_like(array_of(output_tensors[0]))
        return self._run(opts, collectives.scatter, inputs, output_tensors, out, opts.rootRank)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> SimulatedWork:
        """Give rank r the r-th part of every rank's tensor. The sizes count rows."""
        sent, received = exchange_counts(output, input, output_split_sizes, input_split_sizes, self.comm.size)
        named = {"send_counts": sent, "receive_counts": received}
        return self._run(opts, collectives.all_to_all, [input], [output], **named)

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Give rank r every rank's r-th tensor."""
        sent, received = list_counts(output_tensors, input_tensors)
        named = {"send_counts": sent, "receive_counts": received}
        return self._run(opts, collectives.all_to_all, input_tensors, output_tensors, **named)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Block until every rank of the group has entered."""
        self.thread.call(self.comm.barrier)
        return self._done()

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Block until every rank of the group has entered; a rank that does not come is in the report of the hang."""
        self.barrier()

    # messages ---------------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dstRank: int, tag: int) -> SimulatedWork:
        """Send a tensor to a rank of the group."""
        (tensor,) = tensors
        array = array_of(tensor)
        request = self.thread.call(lambda: self.comm.isend(array, dstRank, tag))

        def finish() -> None:
            self.thread.call(request.wait)

        return self._work(finish, (), f"isend{described(tensors)} to rank {self._world_rank(dstRank)}", tensors)

    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> SimulatedWork:
        """Receive a tensor from a rank of the group."""
        (tensor,) = tensors
        array = np.empty_like(array_of(tensor))
        request = self.thread.call(lambda: self.comm.irecv(array, srcRank, tag))

        def finish() -> None:
            self.thread.call(request.wait)
            work.source = request.peer  # known by now, if it was any
            put(array, tensor)

        source = "any rank" if srcRank == ANY else f"rank {self._world_rank(srcRank)}"
        work = self._work(finish, tensors, f"irecv{described(tensors)} from {source}")
        return work

    def recv_anysource(self, tensors: Tensors, tag: int) -> SimulatedWork:
        """Receive a tensor from whoever sends first."""
        return self.recv(tensors, ANY, tag)

    def _world_rank(self, rank: int) -> int:
        return self.comm.members[rank]

    def _all(self, works: Sequence[SimulatedWork], tensors: Tensors) -> SimulatedWork:
        """Return one work for several."""

        def finish() -> None:
            for work in works:
                work.wait()

        return self._work(finish, tensors)

    # Names of older versions of torch for the same operations.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def passed(tensors: Tensors) -> Passed:
    """Return dtype and shape of a tensor, of several those of all their elements; None where there is none."""
    if not tensors:
        return None
    shape = tuple(tensors[0].shape) if len(tensors) == 1 else (sum(map(elements, tensors)),)
    return str(tensors[0].dtype).removeprefix("torch."), shape


def described(tensors: Tensors) -> str:
    """Return what a rank has passed in words: " of float32[2, 3]"."""
    array = passed(tensors)
    return f" of {array[0]}{list(array[1])}" if array else ""


def put_parts(array: np.ndarray | None, tensors: Tensors) -> None:
    """Copy an array into tensors, one after the other; a rank that has no result has None."""
    if array is None:
        return
    ends = np.cumsum([elements(tensor) for tensor in tensors])
    for part, tensor in zip(np.split(array, ends[:-1]), tensors, strict=False):
        put(part, tensor)


def create(options: Any, _: Any = None) -> SimulatedProcessGroup:
    """Make the group that torch asks for, of the rank to which this thread belongs."""
    rank = current_rank()
    members = list(options.global_ranks_in_group) or list(range(rank.comm.size))
    comm = rank.comm
    if len(members) < comm.size or options.group_id not in ("", "0"):
        world, name, place = comm.world, f"group{options.group_id}", members.index(comm.rank)
        comm = rank.call(lambda: type(comm)(world, name, members, place, ""))
    group = SimulatedProcessGroup(comm, rank)
    rank.groups.append(group)
    return group


def register() -> None:
    """Make the backend known to torch, once per process."""
    if BACKEND not in dist.Backend._plugins and BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
