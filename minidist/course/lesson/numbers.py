"""Numbers of lessons: 04 is a lesson of the core, 04b is its first side room, which is read when one likes.

    lessons/04_all_reduce_without_a_boss.py ──▶ "04"        lessons/04b_order_of_additions.py ──▶ "04b"

Side rooms once had numbers without a letter. Submissions, assignments and notes that use these are still understood.

Proved by: tests/lesson/test_numbers.py
"""

from pathlib import Path

SOURCES = "[0-9][0-9]*_*.py"  # of the folder of the lessons

# The number that a lesson had before, and the lesson that has its subject now. No core lesson's number has changed.
MOVED = {
    "01": "00b",
    "07": "06b",
    "08": "06c",
    "13": "12b",
    "15": "14b",
    "18": "17b",
    "21": "14c",
    "23": "06d",
    "24": "09b",
    "25": "20b",
    "27": "05",
    "29": "11b",
    "30": "06f",
    "31": "10b",
    "32": "16b",
    "33": "10",
    "34": "05b",
    "35": "06c",
    "36": "04b",
    "37": "17c",
    "38": "19b",
    "39": "06e",
    "40": "06e",
}
# Exercises of lessons that have become several: 09b, 10b, 10c, 11b, 20b, 22 and 28.
MOVED_EXERCISES = {
    "09b.kept_all_reduce": "09c.kept_all_reduce",
    "09b.distil": "09d.distil",
    "10b.stages_by_time": "20c.stages_by_time",
    "10c.stages_by_time": "20c.stages_by_time",
    "11b.owners_compute": "11c.owners_compute",
    "20b.min_max_split": "20c.min_max_split",
    "22.visible": "22c.visible",
    "28.read_once": "28b.read_once",
}


def number_of(path: Path) -> str:
    """Return the number of a lesson's file, such as "04" or "04b"."""
    return path.stem.partition("_")[0]


def current(name: str) -> str:
    """Return the name that a lesson ("36") or an exercise ("36.ordered_reduce_scatter") has now; others stay."""
    number, dot, rest = name.partition(".")
    moved = MOVED.get(number, number) + dot + rest
    return MOVED_EXERCISES.get(moved, moved)
