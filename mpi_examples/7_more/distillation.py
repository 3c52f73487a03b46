"""Knowledge distillation: the last rank has a large teacher and sends its logits, the others train one small student.

mpiexec -n 4 python mpi_examples/7_more/distillation.py
python mpi_examples/7_more/distillation.py --ranks 4

First all ranks train the teacher. Then a student learns from 600 labelled digits alone, and a second one from the same
digits and the teacher's logits for them (Hinton et al. 2015). Prints how many of 400 other digits each of the three
recognises, and what the teacher sent next to the closed form. With one rank the teacher is on it, and nothing is sent.
`minidist train --distill-from CHECKPOINT --teacher-ranks 1` is this as a job.
"""

import numpy as np

from minidist import (
    MLP,
    Adam,
    DistributedDataParallel,
    Tensor,
    cross_entropy,
    glyphs,
    launch,
    new_purpose,
    no_grad,
    purpose,
)
from minidist.techniques.distillation.loss import distillation_loss

TEACHER_STEPS, STEPS, LABELLED, TEMPERATURE, WEIGHT = 40, 120, 600, 4.0, 0.9
new_purpose("teacher")  # the name under which the trace counts the logits


def fit(comm, sizes, rows, steps, taught=None):
    """Train an MLP on `rows` of the digits on all ranks of `comm`; taught(mine): the teacher's logits for rows."""
    images, labels = glyphs().rows(np.arange(2000))
    mine = np.array_split(rows, comm.size)[comm.rank]
    model = DistributedDataParallel(MLP(sizes), comm, reduction="sum", algorithm="ordered")
    optimizer = Adam(model.flat, lr=0.01)
    for _ in range(steps):
        model.flat.zero_grad()
        outputs = model(Tensor(images[mine]))
        if taught is None:
            loss = cross_entropy(outputs, labels[mine], divisor=len(rows))
        else:
            loss = distillation_loss(outputs, labels[mine], taught(len(mine)), TEMPERATURE, WEIGHT, len(rows))
        loss.backward()
        optimizer.step()
    return model.module


def right(model):
    """Return how many of 400 digits that no model trained on are recognised."""
    images, labels = glyphs().rows(np.arange(1600, 2000))
    with no_grad():
        return int((model(Tensor(images)).data.argmax(axis=1) == labels).sum())


def main(comm):
    features = glyphs().features
    teacher = fit(comm, [features, 256, 10], np.arange(1600), TEACHER_STEPS)

    # The last rank teaches; the others are a separate communicator.
    students = max(1, comm.size - 1)
    rows, last = np.arange(LABELLED), comm.size - 1
    images, _ = glyphs().rows(rows)
    if comm.rank >= students:
        parts = np.array_split(images, students)
        for _ in range(STEPS):
            for student, part in enumerate(parts):
                with no_grad():
                    logits = teacher(Tensor(part)).data
                with purpose("teacher"):
                    comm.send(logits, student)
        sent, formula = comm.trace.bytes_by_purpose()["teacher"], STEPS * LABELLED * 10 * 4
        print(f"the teacher sent {sent:,} B, the formula says {formula:,} B", flush=True)
        return

    def taught(count):
        """Return the teacher's logits for this rank's rows."""
        if comm.size == 1:
            with no_grad():
                return teacher(Tensor(images)).data
        logits = np.empty((count, 10), np.float32)
        with purpose("teacher"):
            comm.recv(logits, last)
        return logits

    group = comm.group(range(students), "students")
    alone = fit(group, [features, 16, 10], rows, STEPS)
    distilled = fit(group, [features, 16, 10], rows, STEPS, taught)
    if comm.rank == 0:
        print(
            f"of 400 digits: teacher {right(teacher)}, student from labels {right(alone)}, student from the teacher"
            f" {right(distilled)}",
            flush=True,
        )


if __name__ == "__main__":
    launch(main)
