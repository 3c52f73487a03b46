"""The simulated world: ranks are greenlets in one process, and time is virtual."""
