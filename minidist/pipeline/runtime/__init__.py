"""Pipelines, their policies and their observers: versions of weights, sharded optimizers, profiles of layers.

pipeline.py          the pipeline that users get: it runs every action of a plan, and refuses what does not fit
replica_reducers.py  what sums gradients over the replicas of stages
refusals.py          what a pipeline refuses
clip.py              the gradient norm over all stages, and clipping by it
early_release.py     when what was sent has arrived
evaluation.py        the forward passes alone
layer_profile.py     how long each layer takes in the steps that train
post_validation.py   the optimizer's step without a global barrier
versioned.py         a pipeline whose weights change while micro-batches are on their way
pipedream.py         PipeDream: which weights each action uses, and when they change
versions.py          the versions of weights that are still needed
skips.py             skip connections: a stage's output goes to a later stage
repeated.py          a dry run that computes only a few of equal micro-batches
stream.py            an asynchronous pipeline step by step, beyond the end of its plan
"""
