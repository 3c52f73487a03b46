"""Our solutions of lesson 10b; they are not a part of the package."""

Batch = tuple[int, int, int]


def batch_sizes(
    ranks: int, train: int | None, micro: int | None, steps: int | None
) -> Batch | None:
    """Fill in what is missing, then hold the three against the rule: train = micro x steps x ranks."""
    if train is None and micro is None:
        return None  # accumulation alone says nothing
    if steps is None:
        steps = train // micro // ranks if train is not None and micro is not None else 1
    if micro is None:
        assert train is not None
        micro = train // ranks // steps
    if train is None:
        train = micro * steps * ranks
    return (
        (train, micro, steps)
        if min(train, micro, steps) > 0 and train == micro * steps * ranks
        else None
    )


SOLUTIONS = {"10.batch_sizes": batch_sizes}
