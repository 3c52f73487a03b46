"""What every folder uses and the core does without: files, meta arrays, kernels of a GPU, other kinds of fibers.

arrays.py          the array functions that the core does without
array_interface.py  what may be used of an array: by NumPy, CuPy and meta arrays
coordinates.py    where the rows of a batch lie in the global batch, and draws at their places
flop_counter.py   floating-point operations and bytes moved
limits.py         the limits of sizes
half.py           float16 and bfloat16
cuda.py           the whole operations of arrays of a GPU, in one module
mkl.py            products of matrices by MKL
cuda_products.py  products by one call of cuBLAS
cuda_attention.py causal attention
cuda_kernels.py   whole operations as kernels in CUDA C, cuda_kernels.cu
meta_kernels.py   the same operations on arrays without data
device.py         where new arrays are made: on the host, on a GPU, or nowhere
meta.py           arrays with a shape and no data
exponents.py      the sizes of an array's entries, as powers of two
memory.py         the bytes that are alive, by purpose
trace_file.py     the record in a file
traces.py         the record of a run
watchers.py       watchers of operations
trace_checks.py   the checks of a trace file
errors.py         how a sentence quotes values, paths and the errors of other programs
files.py          writing files
file_format.py    the format that the ending of a file names
cache.py          arrays that are made once and memory-mapped from then on
read_file.py      reading a user's files
records.py        classes whose values are checked when one is made
user_file.py      FILE.py:FUNCTION
plain_pickle.py   pickles that hold plain values, read without running code
extras.py         packages that a command needs and an installation may lack
promise_fibers.py fibers on JavaScript promises, in a browser
process.py        settings of the process, and its standard output when nobody reads it
warn.py           warnings of what is no error, and most often a mistake
interrupts.py     where a run was when Ctrl-C ended it
"""
