"""Does a parallel run equal one device? `reference.py` says why it can, bit for bit, and `compare.py` checks it.

reference.py        training on one device, each gradient added in the order that the layout declares
gradient_order.py   these orders                    one_device.py       the strategy of the reference
replicas_alone.py   that of replicas that train alone
bucket_sums.py      the gradients of replicas whose buckets a technique sums
snapshot.py         all tensors of a step by name   expected.py         those that a run must equal
compare.py          every tensor of every step of every rank next to the reference's
rounding.py         the tolerance of lower precision, measured on one device
layout_sweep.py     the same for all layouts of some ranks
difference_patterns.py  how a wrong gradient was made of the right one
own_functions.py    what a user's own functions return, on ranks and on one device
"""
