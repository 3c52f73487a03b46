"""Records of a log: whatever launcher and version have written them, the same operation, rank and group are read."""

from minidist.debug.flight_recorder.logs import Identity, Log, Reader, Work
from tests.flight_recorder.lines import status, timeout


def read(*lines, rank=None):
    log = Log()
    reader = Reader(log, rank)
    for line in lines:
        reader.line(line)
    return log


def test_an_operation_of_every_version_and_backend():
    for line, work in (
        (timeout(1, 4, "_ALLGATHER_BASE", 8, 32), Work("_ALLGATHER_BASE", 4, "8 elements", "32 elements", 4)),
        (timeout(1, 4, "_REDUCE_SCATTER_BASE", 6, 2), Work("_REDUCE_SCATTER_BASE", 4, "6 elements", "2 elements", 3)),
        (timeout(1, 4, "_ALLGATHER_BASE", 8, 33), Work("_ALLGATHER_BASE", 4, "8 elements", "33 elements", 0)),
        (timeout(1, 4, "BROADCAST", 1), Work("BROADCAST", 4, "1 element", "1 element")),
        (timeout(1, 4, "COALESCED", 2**64 - 1), Work("COALESCED", 4, "", "")),  # not set
        (timeout(1, 4, form="2.0"), Work("ALLREDUCE", 4, "", "")),
        (timeout(1, 4, size="2, 3", form="1.9"), Work("ALLREDUCE", None, "[2, 3]", "[2, 3]")),
        (
            "[Rank 1] Watchdog caught collective operation timeout: WorkHCCL(NumelOut=2, TimeoutMs=9, more=(1),"
            " NumelIn=2, OpType=ALLTOALL, SeqNum=5) ran for 9 milliseconds before timing out.",
            Work("ALLTOALL", 5, "2 elements", "2 elements"),
        ),
        (
            "[Rank 1] Work WorkNCCL(SeqNum=3, OpType=SEND, Timeout(ms)=5) timed out in blocking wait.",
            Work("SEND", 3, "", ""),
        ),
        ("[Rank 1] WorkNCCL(SeqNum=4, OpTy[Rank 2] WorkNCCL(SeqNum=5, OpType=SEND)", Work("", 4, "", "")),
        (timeout(1, 4)[:150], Work("ALLREDUCE", 4, "", "")),
    ):
        (event,) = read(line).events
        assert (event.work, event.who.in_group) == (work, 1), line
    assert not read(
        "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::WorkNCCL(c10::Device const&) + 0x1d2 (0x7f in lib.so)"
    ).events


def test_ranks_and_groups_of_every_version():
    numbers = "Timeout at NCCL work: 5, last enqueued NCCL work: 9, last completed NCCL work: -1."
    for prefix, who in (
        ("[rank4]:[E9 1:2 ProcessGroupNCCL.cpp:1] [PG ID 2 PG GUID 9 Rank 0]", Identity(4, 0, ("2", "9", ""))),
        (
            "[rank4]:[E9 1:2 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 4]",
            Identity(4, 4, ("0", "0", "default_pg")),
        ),
        ("[rank4]: [PG ID 3 PG GUID a1b2(mesh_tp) Rank 1]", Identity(4, 1, ("3", "a1b2", "mesh_tp"))),
        ("[E ProcessGroupNCCL.cpp:1537] [PG 0 (default_pg) Rank 3]", Identity(None, 3, ("", "0", "default_pg"))),
        ("[PG 1 Rank 11]", Identity(None, 11, ("", "1", ""))),
        ("[Rank 2]", Identity(None, 2, None)),
        ("(WorkerDict pid=34) [rank7]:[E1 2:3 ProcessGroupNCCL.cpp:1] [Rank 0]", Identity(7, 0, None)),
        ("5: ", Identity(5, None, None)),
        ("[1,5]<stderr>:", Identity(5, None, None)),
        ("[5]<stdout>:", Identity(5, None, None)),
        ("PolicyWorker[rank=5]:", Identity(5, None, None)),
        ("[rank5]", Identity(5, None, None)),
        ("[default6]:", Identity(6, None, None)),
        (
            "2026-03-01T10:00:00.123456789Z stderr F [rank3]:[E1 2:3 ProcessGroupNCCL.cpp:1] [Rank 3]",
            Identity(3, 3, None),
        ),
    ):
        (event,) = read(f"{prefix} {numbers}").events
        assert (event.who, event.at, event.enqueued, event.completed) == (who, 5, 9, -1), prefix
    assert read(f"[default6]: {numbers}").local
    assert not read(f"[default6]:[rank6]: {numbers}").local


def test_numbers_of_every_version():
    for line, expected in (
        (status(1, 4, 5, 3), (4, 5, 3)),
        (status(1, 4, 5, 3, form="2.8"), (4, 5, 3)),
        (status(1, None, 5, 5), (None, 5, 5)),
        (status(1, 4, 5, 93459313471793), (4, 5, None)),  # not set
        (status(1, 4, 5, 4), (4, 5, None)),  # it has not ended, so it is not the last that has
        (
            status(1, 4, 5, 3).replace("last completed", "last started NCCL work: 4 (ALLREDUCE), last completed"),
            (4, 5, 3),
        ),
        (status(1, 4, 5, 3).replace("enqueued NCCL work", "enqueuedNCCLwork"), (4, 5, 3)),
    ):
        (event,) = read(line).events
        assert (event.at, event.enqueued, event.completed) == expected, line


def test_the_line_of_the_program_is_the_innermost_outside_pytorch():
    stack = (
        "[rank3]:[E7 1:2 ProcessGroupNCCL.cpp:801] Stack trace of the failed collective: ",
        "#0 all_reduce from /usr/lib/python3/torch/distributed/distributed_c10d.py:3174",
        "#1 step from train.py:55",
        "#2 main from train.py:80",
    )
    log = read(timeout(3, 7), timeout(4, 7), *stack)
    assert [(who.rank, site) for (who, _), site in log.sites.items()] == [(3, "train.py:55 in step")]
    # A record between them ends the stack.
    assert not read(timeout(3, 7), *stack[:2], timeout(4, 7), *stack[2:]).sites


def test_what_else_happens_to_ranks():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp"
    barrier = "did not reach a monitored barrier in time"
    for line, findings in (
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms", [(barrier, 1)]),
        ("[Rank 0]: Ranks 4, 5, 6 failed to pass monitoredBarrier in 2000 ms", [(barrier, r) for r in (4, 5, 6)]),
        ("Rank 0: following ranks failed to respond in time: [1, 3]", [(barrier, 1), (barrier, 3)]),
        ("[rank0]: [Rank 1] is likely stuck", [("is likely stuck", 1)]),
        (
            "[rank2]: Rank 2 successfully reached monitoredBarrier, but",
            [("reached a monitored barrier that failed", 2)],
        ),
        (f"1: RuntimeError: {gloo}/pair.cc:53] Connection closed by peer [127.0.0.1]:108", [("lost a peer", 1)]),
        (
            f"[rank1]: RuntimeError: {gloo}/pair.cc:5] Read error [::1]:1: Connection reset by peer",
            [("lost a peer", 1)],
        ),
        (
            f"RuntimeError: {gloo}/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
            [("timed out while it waited for a peer", None)],
        ),
        (
            " - [1, 2] finished collective #6, but didn't join collective #7 (count from 1)",
            [("ended collective 6 and did not call collective 7", r) for r in (1, 2)],
        ),
        (" - To our best knowledge, ranks [4] are the lagging ranks that", [("called no collective", 4)]),
        (
            "Timed out after 1801 seconds waiting for clients. 3/4 clients joined.",
            [("waited at the start: 3 of 4 ranks joined", None)],
        ),
        (
            "barrier on rank: 0 (world_size=4, worker_count=3, timeout=0:30:00)",
            [("waited at the start: 3 of 4 ranks joined", None)],
        ),
        (
            "[rank2]: torch.OutOfMemoryError: CUDA out of memory.",
            [("raised torch.OutOfMemoryError: CUDA out of memory.", 2)],
        ),
        ("[rank2]: torch.distributed.DistBackendError: NCCL error in: x", []),
        ("a line about a ValueError: none", []),
        ("[rank2]: caught ValueError: x", []),
        (
            "[Rank 0] Collective WorkNCCL(SeqNum=1, OpType=ALLREDUCE) raised the following async exception: x",
            [("lost a peer", 0)],
        ),
    ):
        assert list(read(line).findings) == findings, line
    table = read("  rank      : 2 (local_rank: 2)", "  exitcode  : -9 (pid: 77)", "  exitcode  : 1 (pid: 78)")
    assert list(table.findings) == [("ended with exit code -9, says torchrun", 2)]
    assert list(read("[rank1]: KeyError: a\x1b]0;b\x07\u202ec").findings) == [("raised KeyError: a ]0;b  c", 1)]
    assert list(read("ValueError: x", "KeyError: y", rank=3).findings) == [("raised ValueError: x", 3)]


def test_two_calls_that_torch_distributed_debug_has_compared():
    fields = "SequenceNumber=4, OpType={}, TensorShape=[8], TensorDeviceTypes=TensorOptions(device=cpu)"
    call = f"Rank {{}} is running collective: CollectiveFingerPrint({fields})"
    log = read(
        f"Detected mismatch between collectives. {call.format(2, 'ALLREDUCE')}, but {call.format(0, 'BROADCAST')}."
    )
    assert log.differing == {4: {"ALLREDUCE of [8]": {2}, "BROADCAST of [8]": {0}}}
    other = "Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)"
    log = read(
        f"[rank2]: RuntimeError: Detected mismatch between collectives. {call.format(2, 'ALLREDUCE')}, but {other}."
    )
    assert log.differing == {4: {"ALLREDUCE of [8]": {2}, "REDUCE of unknown size as its number 0": {0}}}
    assert not log.raised
    old = call.format(3, "SCATTER").replace("running", "running inconsistent").replace("SequenceNumber=4, ", "")
    assert read(old).differing == {0: {"SCATTER of [8]": {3}}}


def test_the_number_of_ranks():
    options = "ProcessGroupNCCL initialization options: size: {}, global rank: 1"
    for line, world in (
        ("world_size=8, rank=0", 8),
        ("'world_size': 16", 16),
        ("tensor parallel world size: 2", 0),
        ("local_world_size=4", 0),
        ("3/4 clients joined", 4),
        (f"[rank1]: [PG ID 0 PG GUID 0(default_pg) Rank 1] {options.format(8)}", 8),
        (f"[rank1]: [PG ID 1 PG GUID 3(tp) Rank 1] {options.format(2)}", 0),
    ):
        assert read(line).world == world, line
