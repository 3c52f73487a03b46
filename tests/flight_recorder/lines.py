"""Lines of logs as PyTorch, gloo and launchers write them, for the tests."""


def timeout(rank, number, kind="ALLREDUCE", size=64, out=None, form="2.5", inner=None):
    """The line of a watchdog whose operation has timed out; inner: the rank that it names in brackets."""
    inner = rank if inner is None else inner
    fields = {
        "2.5": f"SeqNum={number}, OpType={kind}, NumelIn={size}, NumelOut={size if out is None else out}, ",
        "2.0": f"SeqNum={number}, OpType={kind}, ",
        "1.9": f"OpType={kind}, TensorShape=[{size}], ",
    }[form]
    begin = (
        f"[rank{rank}]:[E419 10:42:28.8832 ProcessGroupNCCL.cpp:616]" if form == "2.5" else "[E ProcessGroupNCCL.cpp:1]"
    )
    return (
        f"{begin} [Rank {inner}] Watchdog caught collective operation timeout: WorkNCCL({fields}Timeout(ms)=600000)"
        " ran for 600088 milliseconds before timing out."
    )


def status(rank, number, enqueued, completed, group="ID 0 PG GUID 0(default_pg)", inner=None, form="2.5"):
    """The line with the last numbers of a rank in a group; number None: of a rank that was asked for its dump."""
    inner = rank if inner is None else inner
    last = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    said = f"Exception (either an error or timeout) detected by watchdog at work: {number}, {last}"
    if form == "2.8":
        said = (
            f" failure detected by watchdog at work sequence id: {number} PG status: last enqueued work: {enqueued},"
            f" last completed work: {completed}"
        )
    if number is None:
        said = f"Received a dump signal due to a collective timeout from  rank 7 and we try to dump. L{last[1:]}"
    return f"[rank{rank}]:[E419 10:42:28.8835 ProcessGroupNCCL.cpp:1785] [PG {group} Rank {inner}] {said}"
