"""Our solutions of lesson 20b; they are not a part of the package."""


def fastest_mesh(
    n: int, layers: int, activation: float, gradient: float, alpha: float, beta: float
) -> tuple[int, int]:
    """Return (dp, tp): four sums of a replica's activation in each layer, and one of a part's gradient."""

    def ring(ranks: int, nbytes: float) -> float:
        return 2 * (ranks - 1) * (alpha + nbytes / ranks * beta)

    def seconds(mesh: tuple[int, int]) -> float:
        dp, tp = mesh
        return 4 * layers * ring(tp, activation / dp) + ring(dp, gradient / tp)

    return min(((n // tp, tp) for tp in range(1, n + 1) if n % tp == 0), key=seconds)


SOLUTIONS = {"20b.fastest_mesh": fastest_mesh}
