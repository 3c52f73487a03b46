"""The experts of a mixture dealt out over ranks: `ExpertParallel` is the style, `ExpertDataParallel` sums gradients."""

from minidist.parallel.expert.dispatch import ExpertDataParallel, ExpertParallel, exchange

__all__ = ["ExpertDataParallel", "ExpertParallel", "exchange"]
