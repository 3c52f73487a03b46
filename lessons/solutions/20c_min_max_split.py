"""Our solutions of lesson 20c; they are not a part of the package."""

from collections.abc import Sequence


def min_max_split(times: Sequence[float], stages: int) -> list[int]:
    """Return the sizes; best[k][n] is the slowest of k stages of the first n layers, the last of which begins at j."""
    ends = [0.0]
    for time in times:
        ends.append(ends[-1] + time)
    layers = len(times)

    # One more stage at a time: the last stage begins at the j that makes the slowest stage fastest.
    best = [[0.0] + [float("inf")] * layers]
    begins = []
    for _ in range(stages):
        row, begin = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for n in range(1, layers + 1):
            for j in range(n):
                slowest = max(best[-1][j], ends[n] - ends[j])
                if slowest < row[n]:
                    row[n], begin[n] = slowest, j
        best.append(row)
        begins.append(begin)

    # Follow the choices back from the last stage.
    sizes: list[int] = []
    n = layers
    for begin in reversed(begins):
        sizes.insert(0, n - begin[n])
        n = begin[n]
    return sizes


SOLUTIONS = {"20c.min_max_split": min_max_split}
