"""Which values of an array stand for all of it: a sample that notices most writes to the array.

Proved by: tests/autograd/test_in_place.py, tests/misuse/test_misuse.py
"""

from functools import cache
from math import gcd, prod

SAMPLED = 61  # elements that are compared, at least, of an array that has as many


@cache
def sample_step(shape: tuple[int, ...]) -> int:
    """The distance of two sampled values: without a common divisor with the row length, so that columns differ."""
    step = max(1, prod(shape) // SAMPLED)
    while step > 1 and gcd(step, shape[-1]) != 1:
        step -= 1
    return step
