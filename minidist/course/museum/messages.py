"""Bugs of messages: what is never waited for, never received, never joined in, or received as something else.

Proved by: tests/museum/test_museum.py
"""

from typing import Any

from minidist.comm.sim.sim_world import SimWorld
from minidist.core.autograd import Tensor, operands
from minidist.core.autograd.ops import elementwise
from minidist.core.parallel.gradients import GradientReducer
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Catch, Exhibit, Patch

SIMULATED, CHECKS = "tests/comm/sim/test_world.py", "tests/museum/test_checks.py"


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
    patch.setattr(operands, "as_tensor", lambda value, like: Tensor(value))


def scalars_pass_unseen(patch: Patch) -> None:
    """the same, and operations do not compare the dtypes of its operands"""
    scalars_become_float64(patch)

    def pair(name: str, a: Any, b: Any) -> tuple[Tensor, ...]:
        return tuple(t if isinstance(t, Tensor) else Tensor(t) for t in (a, b))

    patch.setattr(elementwise, "pair", pair)


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


EXHIBITS = [
    Exhibit(
        "20a",
        "a request that is never waited for",
        "`isend` returned, the data arrived, the test passed. Until it is waited for, a request owns its buffer and a"
        " piece of the library's memory; under load the buffer is overwritten before it has left.",
        not_waited_for,
        jobs.exchange,
        (Catch(CHECKS, "test_an_exchange_ends_clean", error="UnwaitedRequestError"),),
    ),
    Exhibit(
        "20b",
        "a send with no partner",
        "On the last rank `rank + 1` was clamped instead of wrapped. Buffered sends hide it: the message is never"
        " received.",
        no_partner,
        jobs.exchange,
        (Catch(CHECKS, "test_an_exchange_ends_clean", error="DeadlockError"),),
    ),
    Exhibit(
        "20c",
        "no check looks for what was left over",
        "The same lost request, in a library that does not check: nothing is reported. minidist's check at the end of a"
        " run is tested, too.",
        no_check_at_the_end,
        jobs.exchange,
        (
            Catch(SIMULATED, "test_a_send_that_is_never_received", error="Failed"),
            Catch(SIMULATED, "test_a_request_that_is_never_waited_for", ("send", 8), error="Failed"),
            Catch(SIMULATED, "test_a_request_that_is_never_waited_for", ("work", 0), error="Failed"),
        ),
    ),
    Exhibit(
        "26a",
        "float32 becomes float64 and is received as float32",
        "A learning rate from NumPy is a float64 scalar, and some products with it are float64. The receiver had a"
        " buffer of float32: half of the bytes are read as twice as many numbers.",
        promoted,
        jobs.half_of_the_gradient,
        (Catch(CHECKS, "test_a_halved_gradient_arrives", error="MismatchError"),),
    ),
    Exhibit(
        "26b",
        "the engine takes a scalar's dtype for the result's",
        "The same happens inside the engine: one scalar makes everything after it float64, twice the memory and twice"
        " the messages.",
        scalars_become_float64,
        jobs.half_of_the_loss,
        (Catch(CHECKS, "test_float32_stays_float32", error="DtypeError"),),
    ),
    Exhibit(
        "26c",
        "the engine takes a scalar's dtype and compares no others",
        "Where operations do not compare dtypes, nothing is reported: the loss is float64 from then on.",
        scalars_pass_unseen,
        jobs.half_of_the_loss,
        (Catch(CHECKS, "test_float32_stays_float32"),),
    ),
    Exhibit(
        "28a",
        "a rank skips a collective",
        "One rank's data had one batch less. The others enter the sum and wait. The rank they wait for has returned"
        " from its program, and the report says so.",
        one_step_less,
        jobs.sums,
        (Catch(CHECKS, "test_sums_of_all_ranks", error="DeadlockError"),),
    ),
    Exhibit(
        "28b",
        "a rank drops a bucket",
        "The same one layer below: one rank decides that a bucket needs no sum. From then on each of its sums meets"
        " the next sum of the others.",
        one_bucket_less,
        jobs.train_job(3, 2, dp=3, bucket_cap_mb=5e-3),
        (
            Catch(
                "tests/parallel/test_data_parallel.py",
                "test_any_data_to_the_bit_in_rank_order",
                (3, 1e-4, 0),
                error="MismatchError",
            ),
        ),
    ),
]
