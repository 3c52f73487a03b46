"""Our solutions of lesson 16; they are not a part of the package."""


def gpipe(stages: int, microbatches: int) -> list[list[str]]:
    """On every stage run all forwards, then all backwards, the newest first."""
    forwards = [f"F{i}" for i in range(microbatches)]
    backwards = [f"B{i}" for i in reversed(range(microbatches))]
    return [forwards + backwards for _ in range(stages)]


SOLUTIONS = {"16.gpipe": gpipe}
