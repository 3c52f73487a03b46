"""What a simulated world can do in addition: kill ranks, explore orders of messages, let one rank stand for many.

links.py             costs of links that differ, of each message at a port, and of computing on ranks that differ
sim_world.py         the world that programs run in: it checks and records messages
folded.py            one rank of each class runs, and stands for all of them
watched.py          the state and the messages of a run: receives from any rank, and watchers
choosers.py          which message a wildcard receive gets
checks.py            what watches the messages of a run
process_state.py     random generators and the running event loop, of each rank
failures.py          ranks that are killed on purpose
deadlock_report.py   what a deadlock error says, and what its program probably meant
look_ahead.py        what the ranks would have called next, after two calls that differ
hang_watchdog.py     stops a rank that computes without end
"""
