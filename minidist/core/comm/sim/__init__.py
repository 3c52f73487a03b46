"""The simulated world: ranks are fibers in one process, and time is virtual.

world.py      the ranks as fibers
state.py      what the parts of the world share
matching.py   which send meets which receive
clock.py      what a message costs: the alpha-beta model
"""
