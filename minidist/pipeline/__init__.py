"""Which rank runs which micro-batch when? Plans as data, their checks and their times; `runtime` executes them.

plan/          actions, plans, and one file per schedule: `get_schedule("1f1b").plan(4, 8)`
schedules/     the other schedules, and plans from text, files and functions
validate.py    whether a plan is complete, computes right gradients and cannot deadlock
transfers.py   whether the sends and receives of a plan that has them match
lowering.py    from a plan of computations to one with sends and receives
passes.py      plans made from plans: recomputation, evaluation
simulate.py    the order of events of a plan        times.py    how long each stage's actions take
timing.py, timing_vectorized.py    how long a plan takes, where it idles, and how many activations it keeps
partition.py   which layers make a stage
runtime/       `Pipeline` executes a plan over a communicator; `split_model` and `cut_model` make the stages
"""
