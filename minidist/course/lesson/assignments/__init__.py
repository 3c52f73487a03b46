"""What public courses ask for, as exercises: one file per course, with the names and parameters of its functions.

The courses' own code, tests and texts are not here. Where a course uses PyTorch or mpi4py, a submission uses minidist's
modules and communicator: the functions have the same names and the same parameters, and `comm` where PyTorch has its
default process group.

Proved by: tests/lesson/test_assignments.py, tests/lesson/test_assignment_checks.py
"""
