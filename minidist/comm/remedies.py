"""What to write instead of a name of PyTorch or mpi4py: the sentence for an exception that Python raises.

A rank's AttributeError or TypeError is looked up when it leaves the program (`has_run.with_remedies`), so that no
class here needs a method that only refuses, and `hasattr` is right.

Proved by: tests/comm/test_remedies.py
"""

import re
from traceback import walk_tb

from minidist.base.errors import AutogradError, UsageError, quoted

# By class and by the name that it has elsewhere: what to write.
NAMES: dict[str, dict[str, str]] = {
    "Optimizer": {
        "zero_grad": "the model has the gradients: call model.zero_grad(), or flat.zero_grad() of a FlatParameters"
    },
    "PointToPoint": {
        "Get_rank": "write comm.rank",
        "Get_size": "write comm.size",
        "Send": "write comm.send(array, dest)",
        "Recv": "write comm.recv(array, source)",
        "Isend": "write comm.isend(array, dest)",
        "Irecv": "write comm.irecv(array, source)",
        "Sendrecv": "write comm.sendrecv(array, dest, received, source)",
        "Barrier": "write comm.barrier()",
        "Bcast": "write broadcast(comm, array, root), from minidist",
        "Allreduce": "write all_reduce(comm, array), from minidist",
        "Allgather": "write all_gather(comm, array), from minidist",
        "Alltoall": "write all_to_all(comm, array), from minidist",
        "Reduce_scatter": "write reduce_scatter(comm, array), from minidist",
        "Reduce": "write reduce(comm, array, root), from minidist.collectives",
        "Gather": "write gather(comm, array, root), from minidist",
        "Scatter": "write scatter(comm, array, root), from minidist",
        "Split": "write comm.split(color, key)",
        "Dup": "write comm.dup()",
    },
    "Tensor": {"numpy": "write x.data", "cpu": "write x.data", "view": "write x.reshape(shape)"},
    "Module": {"cuda": 'write model.to("cuda")', "cpu": 'write model.to("cpu")'},
}
# A text of an exception of Python's, and what to write.
_TENSOR = "(?:Tensor|Parameter)"
TEXTS: dict[str, str] = {
    rf"unsupported format string passed to {_TENSOR}\.__format__": "a Tensor has no format such as .3f: format"
    " loss.item(), the number of a Tensor of one element, or x.data",
    rf"'[<>]=?' not supported between instances of .*'{_TENSOR}'": "Tensors are not compared by < and >: compare"
    " loss.item(), the number of a Tensor of one element, or x.data",
    rf"operand '{_TENSOR}' does not support ufuncs": "a function of NumPy got a Tensor, through which no gradient would"
    " get: call the Tensor's own method, such as x.tanh() or x.exp(), or pass its values, x.data",
    r"fully_shard\(\) (?:missing .*'mesh'|takes 1 positional)": "fully_shard needs the communicator over which the"
    " parameters are sharded: write fully_shard(model, mesh=comm)",
    r"DistributedDataParallel\.__init__\(\) missing .*'comm'": "DistributedDataParallel needs the communicator of the"
    " ranks that average gradients: write DistributedDataParallel(model, comm)",
    r"(\w+ has no forward)$": r"\1: define forward(self, x) in the class, which computes what a call of the module"
    " returns",
}


def remedy(error: BaseException) -> UsageError | None:
    """Return the error that says what to write instead; None for an exception of another kind."""
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        for kind in type(error.obj).__mro__:
            names = {name.lower(): text for name, text in NAMES.get(kind.__name__, {}).items()}
            if kind.__module__.startswith("minidist.") and error.name.lower() in names:
                owner = "comm" if kind.__name__ == "PointToPoint" else type(error.obj).__name__
                return UsageError(f"{owner} has no {quoted(error.name, marks=False)}: {names[error.name.lower()]}")
    if isinstance(error, TypeError | NotImplementedError):
        for pattern, text in TEXTS.items():
            if found := re.match(pattern, str(error)):
                return UsageError(found.expand(text))
    # Of a sharded model each rank has parts, which the parameters themselves do not show.
    calls = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, AutogradError) and " is released:" in str(error) and "as_slices" in calls:
        return UsageError(f"{str(error).partition(':')[0]}: make the optimizer of sharded_parameters(model)")
    return None
