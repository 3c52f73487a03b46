"""The two kinds of data: a stream of tokens that is cut into samples, and samples with a label each.

Both have the same three members, so the sampler and the trainer use them in the same way: `samples(context)` returns
the number of samples, `rows(indices, context)` returns the arrays of some of them, and `is_tokens` says whether they
are for a language model. Data stay as they were read (bytes, a memory map), and only the requested rows are converted.

Behind them may come stages (`data/stages.py`), which `rows` applies to what is stored.

Proved by: tests/data/test_datasets.py
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.data.stages import Stage, Visit, prepared

Rows = tuple[np.ndarray, np.ndarray]
CHANNELS = (1, 3, 4)  # the numbers of channels of an image in a file: grey, RGB, RGBA


@dataclass(frozen=True)
class TokenDataset:
    """A 1-D array of token numbers below `vocab_size`.

    With a context of T tokens, sample i is the T + 1 tokens from position i T on: T inputs, and T targets, which are
    the inputs shifted by one token. So neighbouring samples share one token, and no target occurs twice.
    entropy: the entropy of the source in nats per token, below which no model's loss can be; None if it is not known.
    """

    name: str
    tokens: np.ndarray
    vocab_size: int
    entropy: float | None = None
    stages: tuple[Stage, ...] = ()
    block: int = 0  # samples of a block of `shuffle:B`; 0: all samples are shuffled at once
    is_tokens = True

    def samples(self, context: int) -> int:
        """Return the number of complete samples. Raises UsageError when there is none."""
        if self.tokens.size < context + 1:
            raise UsageError(
                f"--data {self.name} has {self.tokens.size} tokens, fewer than one sample of context {context} and its "
                f"last target; use more data or --context {max(1, self.tokens.size - 1)} at most"
            )
        return (self.tokens.size - 1) // context

    def rows(self, indices: np.ndarray, context: int, visit: Visit | None = None) -> Rows:
        """Return inputs and targets of the samples: two int64 arrays of shape (len(indices), context).

        visit: for stages that draw; None: those of the samples' first visits, with seed 0.
        """
        # windows: (samples, T + 1). Inputs are all but the last token, targets all but the first.
        windows = np.empty((len(indices), context + 1), np.int64)
        for row, index in enumerate(indices):
            windows[row] = self.tokens[index * context : (index + 1) * context + 1]
        if self.stages and len(indices):
            windows = self._prepared(windows, visit or Visit(0, indices))
        return windows[:, :-1].copy(), windows[:, 1:].copy()

    def check_stages(self) -> None:
        """Try the stages on the first tokens. Raises UsageError when they cannot be used."""
        self.rows(np.arange(1), min(8, self.tokens.size - 1))

    def _prepared(self, windows: np.ndarray, visit: Visit) -> np.ndarray:
        """Return windows of tokens after the stages, which must leave as many tokens of the vocabulary."""
        made = prepared(self.stages, windows, visit)
        names = " | ".join(stage.text for stage in self.stages)
        if made.shape != windows.shape or made.dtype.kind not in "iu":
            raise UsageError(
                f"--data {self.name} | {names}: samples of shape {windows.shape} became {made.dtype} of shape"
                f" {made.shape}; return as many tokens, as integers"
            )
        if made.min() < 0 or made.max() >= self.vocab_size:
            wrong = int(made.min()) if made.min() < 0 else int(made.max())
            raise UsageError(
                f"--data {self.name} | {names}: made token {wrong}, and tokens are 0 to {self.vocab_size - 1}; return"
                " tokens of the vocabulary"
            )
        return made


@dataclass(frozen=True)
class SampleDataset:
    """Samples of shape (n, ...), and the class number of each, of shape (n,).

    Integer features (pixels, 0 to 255) are stored as they are, and `rows` divides them by 255.
    """

    name: str
    inputs: np.ndarray
    targets: np.ndarray
    classes: int
    stages: tuple[Stage, ...] = ()
    block: int = 0  # samples of a block of `shuffle:B`; 0: all samples are shuffled at once
    is_tokens = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample after its stages, which are tried on the first one."""
        if not self.stages:
            return self.inputs.shape[1:]
        return prepared(self.stages, self.inputs[:1], Visit(0, np.zeros(1, np.int64))).shape[1:]

    @property
    def features(self) -> int:
        """The number of features of one sample."""
        return int(np.prod(self.shape))

    @property
    def image(self) -> tuple[int, int, int] | None:
        """The shape (channels, height, width) of a sample; None unless it is an image of at least 2 x 2 pixels."""
        shape = self.shape
        if len(shape) == 2:
            shape = (1, *shape)
        elif self.channels_last:
            shape = (shape[2], *shape[:2])
        return shape if len(shape) == 3 and min(shape[1:]) >= 2 and shape[0] >= 1 else None

    @property
    def channels_last(self) -> bool:
        """Whether the last dim holds the channels, as in Keras's files: it is 1, 3 or 4, and the first dim is not.

        If the first dim is 1, 3 or 4, it holds the channels.
        """
        shape = self.shape
        return len(shape) == 3 and shape[2] in CHANNELS and shape[0] not in CHANNELS

    def samples(self, context: int = 0) -> int:
        """Return the number of samples. `context` is not used."""
        return len(self.inputs)

    def check_stages(self) -> None:
        """Try the stages on the first sample. Raises UsageError when they cannot be used."""
        self.rows(np.arange(1))

    def rows(self, indices: np.ndarray, context: int = 0, visit: Visit | None = None) -> Rows:
        """Return inputs, float32 of shape (len(indices), features), and targets, int64 of shape (len(indices),).

        visit: for stages that draw; None: those of the samples' first visits, with seed 0.
        """
        inputs = self.inputs[indices]
        if self.stages and len(indices):
            inputs = prepared(self.stages, inputs, visit or Visit(0, indices))
        # inputs: (samples, features). Pixels become numbers in 0..1.
        inputs = inputs.reshape(len(indices), self.features)
        if inputs.dtype.kind in "iub":
            inputs = inputs.astype(np.float32) / np.float32(255)
        return inputs.astype(np.float32, copy=False), self.targets[indices].astype(np.int64)


Dataset = TokenDataset | SampleDataset

DIGEST_PIECE, DIGEST_PIECES = 1 << 20, 1024  # bytes of a piece, and how many pieces are read at most


def data_digest(dataset: Dataset) -> str:
    """Return a fingerprint of the content. Equal data have equal fingerprints, whatever their names and paths.

    All bytes of an array of up to 1 GiB are read. Of a larger array 1,024 pieces of 1 MiB are read, at equal distances;
    its shape is part of the fingerprint.
    """
    if isinstance(dataset, TokenDataset):
        arrays, classes = [dataset.tokens], dataset.vocab_size
    else:
        arrays, classes = [dataset.inputs, dataset.targets], dataset.classes
    digest = hashlib.blake2b(digest_size=16)
    if dataset.stages or dataset.block:
        digest.update(f"{dataset.block} {[stage.text for stage in dataset.stages]}".encode())
    for array in arrays:
        digest.update(f"{classes} {array.dtype} {array.shape} ".encode())
        # A view of the bytes, so that a memory map is read piece by piece.
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pieces = min(DIGEST_PIECES, -(-raw.size // DIGEST_PIECE))
        for number in range(pieces):
            start = number * (raw.size - DIGEST_PIECE) // max(1, pieces - 1) if raw.size > DIGEST_PIECE else 0
            digest.update(raw[start : start + DIGEST_PIECE].data)
    return digest.hexdigest()


HELD_OUT = 0.1  # the share of the data that is held out; it is the last part


def hold_out(dataset: Dataset) -> tuple[Dataset, Dataset]:
    """Return two data sets: the data to train on, and the last tenth, which no stage draws for."""
    same = tuple(stage for stage in dataset.stages if not stage.random)
    if isinstance(dataset, TokenDataset):
        cut = int(dataset.tokens.size * (1 - HELD_OUT))
        return replace(dataset, tokens=dataset.tokens[:cut]), replace(dataset, tokens=dataset.tokens[cut:], stages=same)
    cut = int(len(dataset.inputs) * (1 - HELD_OUT))
    return (
        replace(dataset, inputs=dataset.inputs[:cut], targets=dataset.targets[:cut]),
        replace(dataset, inputs=dataset.inputs[cut:], targets=dataset.targets[cut:], stages=same),
    )
