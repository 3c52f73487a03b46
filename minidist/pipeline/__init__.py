"""Schedules in addition to those of the core, the time of a plan, and the partition of layers into stages.

schedules/     the other schedules, and plans from text, files and functions
errors.py      the error of a plan
plan_methods.py    a plan as text and CSV, and which ranks compute each stage
validate.py    whether a plan is complete, computes right gradients and cannot deadlock
transfers.py   whether the sends and receives of a plan that has them match
simulate.py    the order of events of a plan
deadlocks.py   receives posted earlier, so that no rank waits for ever when sends block
updates.py     plans that update their weights on the way: the versions of the weights that they need
times.py       how long each stage's actions take
passes.py      plans made from plans: recomputation, evaluation
timing.py, timing_vectorized.py    how long a plan takes, where it idles, and how many activations it keeps
partition.py   which layers make a stage
runtime/       pipelines whose weights change under way, refusals, profiles
"""
