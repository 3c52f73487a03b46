"""What watches the messages of a simulated run: each module is a guard (`comm/sim/matching.py`), or several.

recorder.py        the events of the trace, or the bytes by purpose
call_watch.py      the calls of all ranks are alike: headers, roots, communicators
buffer_watch.py    no program touches the memory of a message in flight
"""
