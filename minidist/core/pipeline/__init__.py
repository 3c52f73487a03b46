"""Which rank runs which micro-batch when? Plans as data, and their checks; `runtime` executes them.

plan/          actions, plans, and one file per schedule: `get_schedule("1f1b").plan(4, 8)`
validate.py    whether a plan is complete, computes right gradients and cannot deadlock
lowering.py    from a plan of computations to one with sends and receives
simulate.py    the order of events of a plan
runtime/       `Pipeline` executes a plan over a communicator; `split_model` and `cut_model` make the stages
"""
