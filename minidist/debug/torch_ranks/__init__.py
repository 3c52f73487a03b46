"""Programs of torch.distributed on simulated ranks: each rank is a thread of this process, and one of them runs.

rank_thread.py     a thread for the program of a rank, and the rank that communicates for it
process_group.py   torch's process group, whose messages are those of a simulated world
tensors_in_flight.py   who uses a tensor before the operation that it belongs to has been waited for
split_sizes.py     how many elements go to each rank in an exchange
isolation.py       what ranks of one process must not share: torch's groups, random numbers, environment variables
program.py         runs a script on every rank, and counts what was sent
"""
