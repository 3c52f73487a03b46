"""The functions that apply every kind of parallelism to one model, and the training loop.

task.py          what is trained: the model, its batches and its optimizer; the degrees and the loss of a step
parallelize.py   the kinds of parallelism, applied in order; the loop
strategy.py      a rank's part of the model, and its step; also where the model is cut into stages
data_axis.py     replicas, a sharded optimizer, or sharded parameters
"""
