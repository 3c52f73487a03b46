"""`--teacher-ranks K`: the last K ranks hold the teacher and send its logits to the students (form (c) of teacher.py).

A teacher knows which samples its students train on, because a step's global batch depends on the seed and the step
alone. So no request travels: rank 0 says once from which step the job begins, then logits do, in the order in which
the students use them. Teacher t has the replicas t, t + K, t + 2 K, ... and sends

    for each step, for each micro-batch i of a replica, for each of its replicas: logits of micro-batch i

With context parallelism a replica is several ranks; each gets the logits of its tokens. With tensor parallelism each
gets the logits of all words, because the probability of a word depends on all logits. A teacher computes the next
micro-batch of a student while the last one is on its way.

Proved by: tests/techniques/test_distillation.py
"""

from typing import Any

import numpy as np

from minidist.core.base.trace import new_purpose, purpose
from minidist.core.comm import Comm, Request
from minidist.core.parallel.dims import Axes
from minidist.parallel.context.orders import part_order, sequence_positions
from minidist.techniques import wrapper_options
from minidist.techniques.distillation.teacher import Teacher

new_purpose("teacher")


def place_teacher(teacher: Teacher, comm: Comm, axes: Axes, config: Any, done: int) -> None:
    """Make form (b) or (c) of a student's teacher, as the settings say; every student's rank calls it.

    comm: students and teachers. done: steps that are done, which rank 0 tells every teacher (8 B, purpose teacher).
    """
    if config.shard_teacher:
        teacher.shard(axes.data.dup(), wrapper_options(config).get("prefetch", 1))
    if config.teacher_ranks:
        first = comm.size - config.teacher_ranks
        teacher.receive_from(comm, first + axes.dp.rank % config.teacher_ranks)
        for rank in range(first, comm.size) if comm.rank == 0 else ():
            with purpose("teacher"):
                comm.send(np.array([done], np.int64), rank)


def serve_logits(teacher: Teacher, sampler: Any, comm: Comm, config: Any, batches: Any) -> int:
    """Send the logits of all steps to this teacher's students; every teacher's rank calls it in place of training.

    sampler: makes the students' batches. Returns how many steps were done before the job began.
    """
    dims, k = batches.dims, batches.accumulation
    mine = range(comm.rank - dims.ranks, dims.dp, config.teacher_ranks)
    order, shares = part_order(config.attention, config.ulysses), batches.shares
    done = np.zeros(1, np.int64)
    with purpose("teacher"):
        comm.recv(done, 0)

    sending: dict[int, Request] = {}
    for step in range(int(done[0]), config.steps):
        comm.world.place = f"step {step}, on a teacher's rank"
        for number, replica in ((r * k + i, r) for i in range(k) for r in mine):
            logits = teacher.logits(step, sampler.batch(step, *shares.place(number))[0])
            comm.advance_clock("teacher")

            # The ranks of a replica are neighbours. Each has one message on its way at most.
            for peer in range(dims.cp * dims.tp):
                student, part = replica * dims.cp * dims.tp + peer, peer // dims.tp
                if student in sending:
                    comm.wait(sending[student])
                positions = sequence_positions(config.context, part, dims.cp, order) if dims.cp > 1 else slice(None)
                with purpose("teacher"):
                    rows = logits[:, positions].astype(logits.dtype, order="C", copy=False)
                    sending[student] = comm.isend(rows, student)
    for request in sending.values():
        comm.wait(request)
    return int(done[0])
