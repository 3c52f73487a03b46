"""The MPI world: every rank is a process, and messages are real.

world.py        this process as a rank
direct.py       messages without checks and record
start.py        the start of MPI on all processes
execute.py      a rank from its start to the results on rank 0
agreement.py    what must be equal on all processes is compared
membership.py   the members of a communicator agree before MPI makes it
staging.py      copies between a GPU and the host
waits.py        what is remembered of a message between its post and its wait, and what a rank waits in
watchdog.py     reports operations that are pending for too long
hints.py        the probable cause of a hang
interrupts.py   Ctrl-C
ending.py       the end of MPI, which does not wait for ever for a rank
job_folder.py   what the ranks of a job write down for a report
"""
