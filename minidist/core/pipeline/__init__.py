"""Which rank runs which micro-batch when? Plans as data; `runtime` executes them.

plan/          actions, plans, and the schedules: `get_schedule("1f1b").plan(4, 8)`
lowering.py    from a plan of computations to one with sends and receives
runtime/       `Pipeline` executes a plan over a communicator; `split_model` and `cut_model` make the stages
"""
