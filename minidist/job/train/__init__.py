"""How does a training step run?

trainer.py        the loop                     job.py          model, data and optimizer of a config
run.py            a run on one rank: begin, evaluate, change the layout, save, result
recipe.py         every kind of parallelism, applied to the model in order
strategies/       who holds and who sends what; `strategy.py` is the interface
state.py          what observers and callers get: StepState, TrainResult
loss.py, evaluate.py, metrics.py, progress.py    one thing each that a step reports
parameter_server_trainer.py    the loop of `--strategy ps`, which has no common step
"""
