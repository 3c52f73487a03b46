"""--check-layouts: the type of every result over the tensor axis is checked (parallel/layout_check.py)."""
