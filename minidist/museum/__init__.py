"""A museum of bugs: each was found in public code, and each passed its authors' tests. Here they can be visited.

An exhibit plants its bug in memory, for as long as a visit lasts, into the code that trains; nothing wrong stands in
the tree. A visit runs the same small job with and without it, so that one sees what its authors saw (a loss that falls)
and what they did not (the difference of gradients and weights). Tests of minidist, named by the exhibit, turn red for
it.
"""

from minidist.museum.exhibit import Catch, CheckResult, Exhibit, Patch, Recording
from minidist.museum.rooms import exhibits, find
from minidist.museum.visiting import Visit, visit

__all__ = ["Catch", "CheckResult", "Exhibit", "Patch", "Recording", "Visit", "exhibits", "find", "visit"]
