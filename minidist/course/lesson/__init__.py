"""Tools of the lessons: `check` an exercise, `reveal` its solution, `predict` a number, `expect` an error.

check("04.ring_all_reduce", my_function)         property check, par values, hints, and a leg under mpiexec
check("04.ring_all_reduce", solution("04.ring_all_reduce"))
reveal("04.ring_all_reduce")                     prints that solution to a reader who has tried
guess = predict("messages", 64)                  asks for a number and waits; guess.judge(answer) compares it later
with expect(DeadlockError): ...                  requires that exception and prints its message
picture("lanes", world, "minidist train --dp 4")         shows a picture of a run, with the command that draws it
small_job(dp=3, zero=2)                          the settings of a job on a small GPT
with marked_step(comm, 0): ...                   marks a step in the trace, so that `only_steps` finds it
with memory_of(comm) as account: ...             counts the bytes that are alive, for the picture "memory"
python -m minidist.course.lesson.build 04 --check       is the committed notebook still what its source makes?

Importing this package limits BLAS to one thread: a lesson computes with many small matrices, which more threads make
slower, and bits depend on their number. `minidist.base.process.tune_process(n)` sets another number.
"""

from minidist.base.process import tune_process
from minidist.course.lesson.catalogue import names
from minidist.course.lesson.checker import Result, check, examine
from minidist.course.lesson.expect import expect
from minidist.course.lesson.headings import print_headings
from minidist.course.lesson.prediction import predict
from minidist.course.lesson.setting import marked_step, memory_of, picture, small_job
from minidist.course.lesson.solutions import reveal, solution

__all__ = [
    "Result",
    "check",
    "examine",
    "expect",
    "marked_step",
    "memory_of",
    "names",
    "picture",
    "predict",
    "reveal",
    "small_job",
    "solution",
]

tune_process(1, keep_memory=False)
print_headings()
