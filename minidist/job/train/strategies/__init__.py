"""Who holds what, and who sends what to whom, in one training step.

strategy.py    the interface between the loop and a layout, one method per phase of a step
mesh.py        on a device mesh without a pipeline        pipeline.py, asynchronous_pipeline.py    with one
data_axis.py   a stage's parameters on one data axis: data_parallel.py (replicated), sharded.py (ZeRO 1 to 3)
parameter_server.py    servers and workers in the place of reductions
"""
