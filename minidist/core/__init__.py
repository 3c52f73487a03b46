"""The core: every message of data, tensor, context, expert and pipeline parallelism, of ZeRO and FSDP, and what trains.

Nothing here imports anything outside this folder. Read it in this order:

base/           arrays, errors, random numbers, the trace and the account of memory
autograd/       a tensor, the operations with their gradients, and the backward pass
nn/             modules, and GPT from them
optim/          SGD, Adam and AdamW, and clipping
comm/           what a rank is; the simulated world, its clock and its report of a deadlock
collectives/    all-reduce and the others, from send and receive: five families of algorithms
parallel/       a model, a gradient or an optimizer divided among ranks
pipeline/       schedules as lists, their checks, and their execution
train/          every kind of parallelism applied to one model, and the loop
"""
