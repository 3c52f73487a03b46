"""Gradients, weights and losses of another framework, compared with those of minidist.

dump.py             tensors of another framework's ranks, put together
dump_names.py       its names and layouts as ours
dump_comparison.py  compares its gradients with ours
"""
