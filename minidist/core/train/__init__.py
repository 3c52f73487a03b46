"""The recipe that applies every kind of parallelism to one model, and the training loop.

recipe.py     the kinds of parallelism, in order
trainer.py    the loop
loss.py       the loss of a step, summed over the ranks
"""
