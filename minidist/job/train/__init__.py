"""How does a training step run?

loop.py           the loop                     parallelize.py  every kind of parallelism, applied to a model in order
task.py           what is trained              layout.py       the degree of each axis, and how it works
strategy.py       the phases of a step         data_axis.py    DDP, ZeRO and FSDP         pipeline.py    a pipeline

A job is made of these:

trainer.py        a job on a rank
run.py            a run on one rank: what it adds to a step, evaluations, checkpoints, the result
update.py         what stands before and after the update of a step
job.py            model, data and optimizer of a config
recipe.py         settings -> layout
strategies/       what a job asks of a strategy and of its data axes
state.py          what observers and callers get: StepState, TrainResult
loss.py, evaluate.py, metrics.py, progress.py    one thing each that a step reports
"""
