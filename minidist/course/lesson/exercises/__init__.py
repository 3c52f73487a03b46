"""The exercises of the lessons and their hints. Our solutions are in lessons/solutions/ of the repository.

Proved by: tests/lesson/test_exercises.py
"""
