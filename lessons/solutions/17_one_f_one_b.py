"""Our solutions of lesson 17; they are not a part of the package."""


def one_f_one_b(stages: int, microbatches: int) -> list[list[str]]:
    """On stage s run p-1-s forwards ahead (or m, if less), then a forward and a backward in turn, then the rest."""
    lists = []
    for stage in range(stages):
        ahead = min(microbatches, stages - 1 - stage)
        order = [f"F{i}" for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                order.append(f"F{ahead + i}")
            order.append(f"B{i}")
        lists.append(order)
    return lists


SOLUTIONS = {"17.one_f_one_b": one_f_one_b}
