"""What watches the messages of a simulated run: each module has a watcher (see `core/comm/sim/matching.py`).

recorder.py        the events of the trace, or the bytes by purpose
call_watch.py      the calls of all ranks agree: headers, roots, communicators
buffer_watch.py    no program touches the memory of a message in flight
"""
