"""What a job asks of a layout, in addition to the phases of a step: checkpoints, evaluations, volumes, comparisons.

mesh.py             a strategy without a pipeline
pipeline.py         a pipeline
data_axis.py        a stage's parameters on one data axis, replicated
sharded.py          the same with ZeRO 1 to 3
replicas_alone.py   the same for replicas that train alone and meet
"""
