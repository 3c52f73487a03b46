"""How does a training step run?

The loop, and what applies each kind of parallelism to a model, are in minidist/core/train. A job is made of these:

start.py          the checks and trials before any rank starts
trainer.py        a job on a rank: what it adds to a step of the loop, evaluations, checkpoints, the result
update.py         what happens before and after the update of a step
job.py            model, data and optimizer of a config
recipe.py         the layout and the task that the settings describe
strategies/       what a job adds to the strategies of the core, and to their data axes
state.py          what observers and callers get: StepState, TrainResult
evaluate.py       the loss on held-out data
metrics.py        the records of `--metrics`
progress.py       the lines that a run prints while it trains
"""
