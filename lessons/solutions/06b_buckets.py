"""Our solutions of lesson 06b; they are not a part of the package."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidist.core.comm import Comm


def bucketed_reducer(
    comm: Comm,
    backward: Iterator[int],
    uses: Sequence[int],
    buckets: Sequence[Sequence[int]],
    launch: Callable[[int], Any],
) -> None:
    """Launch each bucket as soon as it is complete and the bucket before it was launched; then wait for all."""
    left = list(uses)
    works: list[Any] = []

    def launch_complete_buckets() -> None:
        while len(works) < len(buckets) and not any(
            left[parameter] for parameter in buckets[len(works)]
        ):
            works.append(launch(len(works)))

    launch_complete_buckets()  # a bucket in which no parameter is used is complete at once
    for parameter in backward:
        left[parameter] -= 1
        launch_complete_buckets()
    for work in works:
        work.wait()


SOLUTIONS = {"06b.bucketed_reducer": bucketed_reducer}
