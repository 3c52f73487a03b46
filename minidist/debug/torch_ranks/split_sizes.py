"""How many elements each rank sends and receives in torch's exchanges. Needs no PyTorch; a tensor has a shape.

    all_to_all_single(output, input, output_split_sizes, input_split_sizes)    rows of `input` are sent, those of
                                                                               `output` are received
    alltoall(output_tensors, input_tensors)                                    a tensor for each rank on both sides

Proved by: tests/torch_ranks/test_split_sizes.py, tests/torch_ranks/test_program.py
"""

from collections.abc import Sequence
from typing import Any


def elements(tensor: Any) -> int:
    """Return the number of elements that `array_of` makes of a tensor: a complex number is two."""
    count: int = tensor.numel() * (2 if tensor.dtype.is_complex else 1)
    return count


def row_of(tensor: Any) -> int:
    """Return the elements of a row, an entry of the first axis."""
    return elements(tensor) // max(1, tensor.shape[0]) if tensor.dim() else 1


def exchange_counts(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    ranks: int,
) -> tuple[list[int] | None, list[int] | None]:
    """Return the elements that go to each rank and those that come from each; None twice when both sides are even.

    The arguments are those of `all_to_all_single`, whose sizes count rows. A side without sizes is split evenly.
    """
    sent = [size * row_of(input) for size in input_split_sizes] if input_split_sizes else None
    received = [size * row_of(output) for size in output_split_sizes] if output_split_sizes else None
    if (sent is None) != (received is None):
        sent = sent or [elements(input) // ranks] * ranks
        received = received or [elements(output) // ranks] * ranks
    return sent, received


def list_counts(output_tensors: Sequence[Any], input_tensors: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the elements that go to each rank and those that come from each, of `alltoall`."""
    return [elements(each) for each in input_tensors], [elements(each) for each in output_tensors]
