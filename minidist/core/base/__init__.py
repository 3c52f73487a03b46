"""The base layer: arrays, errors, randomness, layouts, memory accounts and traces; no tensors, no communication.

arrays.py         the array functions
layout.py         where the pieces of a global array are
random.py         random numbers that depend on what they are for
fingerprint.py    a few bytes that stand for many
watchers.py       what is told of every recorded operation
trace.py          the record of a run
lazy.py           names of a package that are imported when they are used
errors.py         the exceptions, and how a sentence quotes a value
fibers.py         programs in one thread that run until they pause
registry.py       entries that are found by name
hooks.py          where a library takes part in what the core does
"""
