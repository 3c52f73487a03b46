"""Our solutions of lesson 11b; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm


def trust_ratio_step(
    comm: Comm, sizes: list[int], weights: np.ndarray, update: np.ndarray
) -> np.ndarray:
    """Sum the squares of all layers in one all-reduce; each rank steps its elements by the ratios of whole layers."""
    layer_of = np.repeat(np.arange(len(sizes)), sizes)
    squares = np.zeros((2, len(sizes)))
    np.add.at(squares[0], layer_of, weights**2)
    np.add.at(squares[1], layer_of, update**2)
    all_reduce(comm, squares)

    # A layer of zeros, or a layer without an update, has the ratio 1.
    both = (squares > 0).all(axis=0)
    ratios = np.where(both, np.sqrt(squares[0] / np.where(both, squares[1], 1)), 1)
    result: np.ndarray = weights - ratios[layer_of] * update
    return result


SOLUTIONS = {"11b.trust_ratio_step": trust_ratio_step}
