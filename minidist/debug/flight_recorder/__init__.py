"""Why does a job of torch.distributed hang? The answer is in the dumps of PyTorch's Flight Recorder, one per rank.

dump.py       reads the dumps: a pickle or JSON file per rank becomes a list of operations
diagnosis.py  matches the operations of all ranks, and says which rank waits for which, and where they differ first
write.py      writes dumps of a simulated run that hangs, in the same form
corpus.py     programs that hang, each with the cause that a diagnosis must find

Proved by: tests/flight_recorder
"""
