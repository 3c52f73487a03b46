"""The base layer: arrays, errors, randomness, layouts, memory accounts and traces; no tensors, no communication."""
