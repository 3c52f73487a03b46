"""Who holds what, and who sends what to whom, in one training step."""
