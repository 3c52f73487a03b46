"""Our solutions of lesson 26b; they are not a part of the package."""


def steps_between_saves(cards: int, mtbf: float, save: float, step: float) -> int:
    """Try the numbers of steps below and above sqrt(2 C M)."""
    failures = mtbf / cards
    below = max(1, int((2 * save * failures) ** 0.5 / step))

    def cost(steps: int) -> float:
        interval = steps * step
        return save / interval + interval / (2 * failures)

    return min(below, below + 1, key=cost)


SOLUTIONS = {"26b.steps_between_saves": steps_between_saves}
