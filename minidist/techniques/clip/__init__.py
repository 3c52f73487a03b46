"""--clip: the gradient of a step has at most this norm."""
