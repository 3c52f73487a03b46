"""The base layer: arrays, errors, random numbers, layouts and purposes; no tensors, no communication.

arrays.py         the array functions
layout.py         where the pieces of a global array are
random.py         random numbers that depend on their use, not on the rank, and fingerprints
trace.py          what messages are for, and the objects that are told of every recorded operation
lazy.py           names of a package that are imported when they are used
errors.py         the exceptions
fibers.py         programs that take turns in one thread
registry.py       entries that are found by name
hooks.py          where a library adds to what the core does
"""
