"""Bugs of messages: what is never waited for, never received, never joined in, or received as something else.

Proved by: tests/museum/test_museum.py
"""

from typing import Any

from minidist.comm.sim.sim_world import SimWorld
from minidist.core.autograd import Tensor, operators
from minidist.core.parallel.data_parallel import GradientReducer
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Patch


def not_waited_for(patch: Patch) -> None:
    """the receive is waited for, the send is not"""
    patch.setattr(jobs, "waits_for", lambda sent, received: (received,))


def no_partner(patch: Patch) -> None:
    """the last rank's neighbour is itself, and another rank waits for what is never sent"""
    patch.setattr(jobs, "partner_of", lambda rank, ranks: min(rank + 1, ranks - 1))


def no_check_at_the_end(patch: Patch) -> None:
    """the end of a run does not look for requests without a wait or sends without a receive"""
    patch.setattr(SimWorld, "_finish", lambda self: None)
    not_waited_for(patch)


def promoted(patch: Patch) -> None:
    """a float32 array times a NumPy scalar of float64 is float64, and so is the message"""
    patch.setattr(jobs, "scaled", lambda array: array.astype("float64") * 0.5)


def scalars_become_float64(patch: Patch) -> None:
    """an operation of the engine takes a NumPy scalar as float64"""
    patch.setattr(operators, "as_tensor", lambda value, like: Tensor(value))


def scalars_pass_unseen(patch: Patch) -> None:
    """the same, and operations do not compare the dtypes of its operands"""
    scalars_become_float64(patch)

    def pair(name: str, a: Any, b: Any) -> tuple[Tensor, ...]:
        return tuple(t if isinstance(t, Tensor) else Tensor(t) for t in (a, b))

    patch.setattr(operators, "pair", pair)


def one_step_less(patch: Patch) -> None:
    """rank 2 leaves out its last step: its data ran out"""
    patch.setattr(jobs, "takes_part", lambda rank, step: (rank, step) != (2, 2))


def one_bucket_less(patch: Patch) -> None:
    """rank 1 alone believes that bucket 0 needs no sum"""
    launch = GradientReducer.launch

    class Nothing:
        def wait(self) -> None:
            pass

    def drop(self: Any, bucket: Any) -> None:
        if self.comm.rank == 1 and bucket.index == 0:
            self.works.append(Nothing())
        else:
            launch(self, bucket)

    patch.setattr(GradientReducer, "launch", drop)
