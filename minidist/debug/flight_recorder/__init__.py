"""Why does a job of torch.distributed hang? The answer is in the dumps of PyTorch's Flight Recorder, and in the logs.

files.py           which files are dumps and which are logs
dump.py            reads the dumps: a pickle or JSON file per rank becomes a list of operations
log_lines.py       reads logs as a stream
logs.py            what a record of a log says: a rank, a group, an operation
log_ranks.py       the operations of every rank of a log, as those of a dump
diagnosis.py       matches the operations of all ranks, and says which rank waits for which, and where they differ first
log_diagnosis.py   the same of logs, and what they leave open
watchdog.py        writes the dumps of a job on the CPU that hangs: `watch`
write.py           writes dumps of a simulated run that hangs, in the same form
corpus.py          programs that hang, each with the cause that a diagnosis must find

Proved by: tests/flight_recorder
"""

from minidist.debug.flight_recorder.watchdog import watch

__all__ = ["watch"]
