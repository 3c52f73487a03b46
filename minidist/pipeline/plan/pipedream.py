"""PipeDream: no flush. The pipeline never drains; a stage updates its weights after every backward.

    rank 0   F0 F1 F2 .. B0 F3 B1 F4 B2 F5 B3 ...        1F1B's order over an endless stream, drained at the end
                          ↑ update 1   ↑ update 2        F3 sees version 1, its B must see version 1 too: stash it

Mini-batch t uses on stage s version max(0, t - (p-1-s)) in F and in B, so stage s keeps p-s versions: the law is
W(t+1) = W(t) - lr grad f(w_0^(t-p+1), ..., w_{p-1}^(t)). With `stashing=False` B would use version t, which is the gradient of
no function. With vertical sync every stage uses the version that stage 0 had when t entered. Sources: Harlap et al.,
arXiv:1806.03377; Narayanan et al., PipeDream, SOSP 2019.
"""

from minidist.pipeline.plan.one_f_one_b import stage_order
from minidist.pipeline.plan.registry import Orders, schedule


@schedule("pipedream", aliases=("weight-stashing", "asynchronous-1f1b"), updates="stash")
def pipedream(p: int, m: int, stashing: bool = True) -> Orders:
    """m mini-batches of one stream, an update after each."""
    return [stage_order(s, m, min(m, p - 1 - s)) for s in range(p)]


@schedule("pipedream-vertical-sync", aliases=("vertical-sync",), updates="vertical-sync")
def pipedream_vertical_sync(p: int, m: int) -> Orders:
    """The same order; the versions differ."""
    return [stage_order(s, m, min(m, p - 1 - s)) for s in range(p)]
