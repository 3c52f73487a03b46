"""A training job from its settings to its checkpoints, and the proof that it equals one device.

config/        settings, files of settings, and the rules of what does not combine
train/         the training loop, and the layouts that it trains on
checkpoint/    what a job saves, and reads on any number of ranks
equality/      the comparison of a job with training on one device
"""
