"""What a job asks of a layout, in addition to the phases of a step: checkpoints, evaluations, volumes, comparisons.

strategy.py    what it asks of each strategy
mesh.py        on a device mesh without a pipeline        pipeline.py    with one
data_axis.py   a stage's parameters on one data axis: data_parallel.py (replicated), sharded.py (ZeRO 1 to 3)
"""
