"""The base layer: arrays, errors, randomness, layouts, memory accounts and traces; no tensors, no communication.

array_interface.py  what may be used of an array: NumPy, CuPy and meta arrays alike
arrays.py         the array functions
half.py           float16 and bfloat16
cuda_kernels.py   whole operations as kernels of a GPU
meta_kernels.py   the same operations on arrays without data
device.py         where new arrays are made: on the host, on a GPU, or nowhere
meta.py           arrays with a shape and no data
layout.py         where the pieces of a global array are
random.py         random numbers that depend on what they are for
fingerprint.py    a few bytes that stand for many
exponents.py      the sizes of an array's entries, as powers of two
memory.py         the bytes that are alive, by purpose
flop_counter.py   floating-point operations
watchers.py       what is told of every recorded operation
trace.py          the record of a run
trace_file.py     the record in a file
lazy.py           names of a package that are imported when they are used
trace_checks.py   the checks of a trace file
errors.py         the exceptions, and how a sentence quotes a value
limits.py         the limits of sizes
files.py          writing files
file_format.py    the format that the ending of a file names
cache.py          arrays that are made once and memory-mapped from then on
read_file.py      reading a user's files
plain_pickle.py   reading pickles that nobody vouches for
user_file.py      FILE.py:FUNCTION
plain_pickle.py   pickles that hold plain values, read without running code
extras.py         packages that a command needs and an installation may lack
fibers.py         programs in one thread that run until they pause
promise_fibers.py fibers on JavaScript promises, in a browser
registry.py       entries that are found by name
hooks.py          where a library takes part in what the core does
process.py        settings of the process
interrupts.py     where a run was when Ctrl-C ended it
"""
