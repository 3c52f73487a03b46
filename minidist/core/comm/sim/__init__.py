"""The simulated world: ranks are fibers in one process, and time is virtual.

world.py      the ranks as fibers
matching.py   which send meets which receive, and what a message costs: the alpha-beta model
"""
