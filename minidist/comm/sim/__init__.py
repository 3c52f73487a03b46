"""The simulated world: ranks are fibers in one process, and time is virtual.

world.py             the ranks as fibers
sim_world.py         the world that programs run in: with everything that watches
folded.py            one rank of each class runs, and stands for all of them
state.py             what the parts of the world share
matching.py          which send meets which receive
choosers.py          which message a wildcard receive gets
clock.py             what a message costs: the alpha-beta model
nodes.py             ranks that the fastest links join
checks/              what watches the messages of a run
process_state.py     random generators and the running event loop, of each rank
failures.py          ranks that are killed on purpose
deadlock_report.py   what a deadlock error says
deadlock_hints.py    and what was probably meant
look_ahead.py        what the ranks would have called next, after two calls that differ
hang_watchdog.py     stops a rank that computes without end
ended.py             a communicator when its run is over
"""
