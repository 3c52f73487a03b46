"""Settings shared by all tests: hypothesis draws the same examples in every run."""

from hypothesis import settings

# The same examples everywhere, so that a red test is red for everybody; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("ci")
