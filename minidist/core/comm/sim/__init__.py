"""The simulated world: ranks are fibers in one process (world.py), whose messages take virtual time (matching.py)."""
