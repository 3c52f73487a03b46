"""The two kinds of data: a stream of tokens that is cut into samples, and samples with a label each.

Both have the same three members, so that the sampler and the trainer need not know which one they have: the number of
samples (`samples(context)`), the arrays of some of them (`rows(indices, context)`), and which model fits (`is_tokens`).
Data stay as they were read (bytes, a memory map) and are converted only for the rows that are asked for.

Proved by: tests/data/test_datasets.py
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from minidist.base.errors import UsageError

Rows = tuple[np.ndarray, np.ndarray]
CHANNELS = (1, 3, 4)  # of an image in a file: grey, colours, colours and transparency


@dataclass(frozen=True)
class TokenDataset:
    """A 1-D array of token numbers below `vocab_size`.

    Sample i of a context of T is the T + 1 tokens from i T on: T inputs, and T targets, which are the inputs one token
    later. So neighbouring samples share one token and no target occurs twice.
    entropy: nats per token that no model can beat, where the source is known; else None.
    """

    name: str
    tokens: np.ndarray
    vocab_size: int
    entropy: float | None = None
    is_tokens = True

    def samples(self, context: int) -> int:
        """Return the number of whole samples. Raises UsageError when there is none."""
        if self.tokens.size < context + 1:
            raise UsageError(
                f"--data {self.name} has {self.tokens.size} tokens, fewer than one sample of context {context} and its "
                f"last target; use more data or --context {max(1, self.tokens.size - 1)} at most"
            )
        return (self.tokens.size - 1) // context

    def rows(self, indices: np.ndarray, context: int) -> Rows:
        """Return inputs and targets of the samples: two int64 arrays of shape (len(indices), context)."""
        # windows: (samples, T + 1). Inputs are all but the last token, targets all but the first.
        windows = np.empty((len(indices), context + 1), np.int64)
        for row, index in enumerate(indices):
            windows[row] = self.tokens[index * context : (index + 1) * context + 1]
        return windows[:, :-1].copy(), windows[:, 1:].copy()


@dataclass(frozen=True)
class SampleDataset:
    """Samples of any shape, (n, ...), with a class number each, (n,).

    Whole-number features (pixels, 0 to 255) are kept as they are and divided by 255 when they are asked for.
    """

    name: str
    inputs: np.ndarray
    targets: np.ndarray
    classes: int
    is_tokens = False

    @property
    def features(self) -> int:
        """The number of features of one sample."""
        return int(np.prod(self.inputs.shape[1:]))

    @property
    def image(self) -> tuple[int, int, int] | None:
        """(channels, height, width) of a sample; None where it is no image of at least 2 x 2 pixels."""
        shape = self.inputs.shape[1:]
        if len(shape) == 2:
            shape = (1, *shape)
        elif self.channels_last:
            shape = (shape[2], *shape[:2])
        return shape if len(shape) == 3 and min(shape[1:]) >= 2 and shape[0] >= 1 else None

    @property
    def channels_last(self) -> bool:
        """Whether the channels of a pixel lie side by side, as in Keras's files: the last dim is 1, 3 or 4.

        Where the first dim is, too, it is taken for the channels.
        """
        shape = self.inputs.shape[1:]
        return len(shape) == 3 and shape[2] in CHANNELS and shape[0] not in CHANNELS

    def samples(self, context: int = 0) -> int:
        """Return the number of samples; a context has no meaning here."""
        return len(self.inputs)

    def rows(self, indices: np.ndarray, context: int = 0) -> Rows:
        """Return inputs, float32 of shape (len(indices), features), and targets, int64 of shape (len(indices),)."""
        # (samples, features); pixels become numbers in 0..1.
        inputs = self.inputs[indices].reshape(len(indices), self.features)
        if inputs.dtype.kind in "iub":
            inputs = inputs.astype(np.float32) / np.float32(255)
        return inputs.astype(np.float32, copy=False), self.targets[indices].astype(np.int64)


Dataset = TokenDataset | SampleDataset

DIGEST_PIECE, DIGEST_PIECES = 1 << 20, 1024  # bytes: of larger data so many pieces are read


def data_digest(dataset: Dataset) -> str:
    """Return a fingerprint of the content: equal data have equal ones, whatever their name and path.

    All bytes count up to 1 GiB. Of larger arrays 1,024 pieces of 1 MiB do, at equal distances, and the length.
    """
    if isinstance(dataset, TokenDataset):
        arrays, classes = [dataset.tokens], dataset.vocab_size
    else:
        arrays, classes = [dataset.inputs, dataset.targets], dataset.classes
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{classes} {array.dtype} {array.shape} ".encode())
        # A view of the bytes, so that a memory map is read piece by piece.
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pieces = min(DIGEST_PIECES, -(-raw.size // DIGEST_PIECE))
        for number in range(pieces):
            start = number * (raw.size - DIGEST_PIECE) // max(1, pieces - 1) if raw.size > DIGEST_PIECE else 0
            digest.update(raw[start : start + DIGEST_PIECE].data)
    return digest.hexdigest()


HELD_OUT = 0.1  # of the data, its last part


def hold_out(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Return (what is trained on, the last tenth), of tokens or of samples."""
    if isinstance(dataset, TokenDataset):
        cut = int(dataset.tokens.size * (1 - HELD_OUT))
        return replace(dataset, tokens=dataset.tokens[:cut]), replace(dataset, tokens=dataset.tokens[cut:])
    cut = int(len(dataset.inputs) * (1 - HELD_OUT))
    return (
        replace(dataset, inputs=dataset.inputs[:cut], targets=dataset.targets[:cut]),
        replace(dataset, inputs=dataset.inputs[cut:], targets=dataset.targets[cut:]),
    )
