"""Tools of the lessons: `check` an exercise, `expect` an error, `build` the notebooks.

check("04.ring_all_reduce", my_function)         property check, par values, hints, and a leg under mpiexec
check("04.ring_all_reduce", solution("04.ring_all_reduce"))
with expect(DeadlockError): ...                  requires that exception and prints its message
python -m minidist.lesson.build 04 --check       is the committed notebook still what its source makes?
"""

from minidist.lesson.checker import Result, check, examine
from minidist.lesson.exercise import names, solution
from minidist.lesson.expect import expect

__all__ = ["Result", "check", "examine", "expect", "names", "solution"]
