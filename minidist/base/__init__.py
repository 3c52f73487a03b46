"""The ground floor: arrays, errors, randomness, layouts and the trace. Knows no tensor and no rank's conversation."""
