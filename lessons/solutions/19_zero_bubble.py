"""Our solutions of lesson 19; they are not a part of the package."""


def zero_bubble(stages: int, microbatches: int) -> list[list[str]]:
    """Return 1F1B with I for B; stage s does its weight gradients s micro-batches later, when it would wait anyway."""
    lists = []
    for stage in range(stages):
        ahead = min(microbatches, stages - 1 - stage)
        order = [f"F{i}" for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                order.append(f"F{ahead + i}")
            order.append(f"I{i}")
            if i >= stage:
                order.append(f"W{i - stage}")
        order += [f"W{i}" for i in range(max(0, microbatches - stage), microbatches)]
        lists.append(order)
    return lists


SOLUTIONS = {"19.zero_bubble": zero_bubble}
