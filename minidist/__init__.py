"""minidist: distributed training that you can read, run on a laptop, and check."""

__version__ = "0.2.0.dev0"
