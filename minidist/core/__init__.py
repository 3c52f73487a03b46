"""The core: data, tensor, context, expert and pipeline parallelism, ZeRO and FSDP in their plainest form, and the loop.

Nothing here imports anything outside this folder; variants and checks send their messages from `minidist/parallel`.
README.md names six files to read first; then pipeline/schedules.py, plan.py, runtime/messages.py and pipeline.py, and
train/parallelize.py. A folder imports only what is above it in this table:

base/           arrays, errors, random numbers, the trace and the watchers of operations
autograd/       a tensor, the operations with their gradients, and the backward pass
nn/             modules, and the MLP and GPT made from them
optim/          AdamW and SGD, and what all optimizers share
comm/           communicators and meshes; the simulated world and its clock
collectives/    all-reduce and five others, made of send and receive by three families of algorithms
parallel/       a model, a gradient or an optimizer divided among ranks
pipeline/       schedules as lists of actions, and their execution
train/          every kind of parallelism applied to one model, and the loop
"""
