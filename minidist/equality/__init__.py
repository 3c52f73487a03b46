"""Does a parallel run equal one device? `reference.py` says why it can, bit for bit, and `compare.py` checks it.

reference.py         training on one device, each gradient added in the order that the layout declares
gradient_order.py    these orders
local_steps.py       the reference of local SGD         delayed_replay.py   of an asynchronous pipeline
compare.py           every tensor of every step of every rank beside the reference's
served.py            the same for a parameter server    layout_sweep.py     for all layouts of some ranks
"""
