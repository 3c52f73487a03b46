"""Which rank runs which micro-batch when? Plans as data; `runtime` executes them.

plan.py        actions and plans, and how sends and receives are added to a plan of computations
schedules.py   from GPipe to zero bubble: `get_schedule("1f1b").plan(4, 8)`
runtime/       `Pipeline` executes a plan over a communicator; `split_model` and `cut_model` make the stages
"""
