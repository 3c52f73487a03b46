"""The ground floor: arrays, errors, randomness, layouts and the trace. Knows neither tensors nor ranks' conversations."""
