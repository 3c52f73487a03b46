"""The MPI world: every rank is a process, and messages are real."""
