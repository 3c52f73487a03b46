"""A small residual network for images: the model on which batch normalisation and pipelines meet.

    pixels ─ stem ──────────────────────────── block ─ block ─ ... ─ head ─▶ classes
             conv 3x3, norm, relu, pool 2x2    (C, H/2, W/2) each    mean over the image, linear

    block    y = relu(x + norm(conv 3x3(relu(norm(conv 3x3(x))))))

All blocks have as many channels, so all boundaries between stages of a pipeline have one shape, and blocks are equal.
Convolutions in front of a norm have no bias, because the norm subtracts it again.

Source: He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2, without its downsampling.
Proved by: tests/nn/test_convolution.py, tests/train/test_cnn.py
"""

from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.nn.layers import Linear
from minidist.core.nn.module import Identity, Module, Sequential, run_blocks
from minidist.nn.batch_norm import BatchNorm
from minidist.nn.convolution import Conv2d
from minidist.nn.ops.functions import relu
from minidist.nn.ops.pooling import global_avg_pool2d, max_pool2d

POOL = 2  # the stem halves height and width


class ConvNorm(Module):
    """A 3x3 convolution that keeps height and width, and a batch norm; without norm the convolution has a bias."""

    def __init__(self, channels_in: int, channels: int, norm: bool, dtype: Any) -> None:
        self.conv = Conv2d(channels_in, channels, 3, padding=1, dtype=dtype, seed=None, bias=not norm)
        self.norm = BatchNorm(channels, dtype=dtype, seed=None) if norm else Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(N, in, H, W) -> (N, channels, H, W)."""
        result: Tensor = self.norm(self.conv(x))
        return result


class Stem(Module):
    """Rows of pixels to images, and one convolution: (N, pixels) -> (N, C, H // 2, W // 2).

    image: (channels, height, width). channels_last: whether a pixel's channels lie side by side, as in Keras's files.
    """

    def __init__(self, image: tuple[int, int, int], channels: int, norm: bool, channels_last: bool, dtype: Any) -> None:
        self.image, self.channels_last = image, channels_last
        self.first = ConvNorm(image[0], channels, norm, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(N, pixels) -> (N, C, H // 2, W // 2)."""
        c, h, w = self.image
        if self.channels_last:
            images = x.reshape(x.shape[0], h, w, c).transpose(0, 3, 1, 2)
        else:
            images = x.reshape(x.shape[0], c, h, w)
        return max_pool2d(relu(self.first(images)), POOL)


class ResidualBlock(Module):
    """Two convolutions next to a path that leaves the image as it is: (N, C, H, W) -> the same shape."""

    def __init__(self, channels: int, norm: bool, dtype: Any) -> None:
        self.first = ConvNorm(channels, channels, norm, dtype)
        self.second = ConvNorm(channels, channels, norm, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """relu(x + second(relu(first(x))))."""
        return relu(x + self.second(relu(self.first(x))))


class ClassifierHead(Module):
    """The mean of every channel over the image, and a linear layer: (N, C, H, W) -> (N, classes)."""

    def __init__(self, channels: int, classes: int, dtype: Any) -> None:
        self.linear = Linear(channels, classes, dtype=dtype, seed=None)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, classes)."""
        result: Tensor = self.linear(global_avg_pool2d(x))
        return result


class CNN(Module):
    """A residual network of `blocks` blocks with `channels` channels for images of shape `image`, channels first.

    norm: with batch normalisation. Parameters are called "stem.first.conv.weight", "layers.0.first.norm.bias", ...,
    "head.linear.weight".
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        classes: int,
        channels: int,
        blocks: int,
        norm: bool = True,
        channels_last: bool = False,
        dtype: Any = xp.float32,
        seed: int = 0,
    ) -> None:
        self.stem = Stem(image, channels, norm, channels_last, dtype)
        self.layers = [ResidualBlock(channels, norm, dtype) for _ in range(blocks)]
        self.head = ClassifierHead(channels, classes, dtype)
        self.initialize(seed)

    @property
    def blocks(self) -> list[ResidualBlock]:
        """The residual blocks, in order: what a pipeline cuts between and FSDP shards one by one."""
        return self.layers

    def stage(self, first: int, last: int, is_first: bool, is_last: bool) -> Sequential:
        """Return blocks first..last-1 as a stage of a pipeline; the first one has the stem, the last one the head."""
        return Sequential(*[self.stem] * is_first, *self.layers[first:last], *[self.head] * is_last)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of pixels (N, channels * height * width) -> (N, classes)."""
        result: Tensor = self.head(run_blocks(self.layers, self.stem(x)))
        return result


def block_shape(image: tuple[int, int, int], channels: int) -> tuple[int, int, int]:
    """Return the shape of one sample's activation between two blocks, for images of shape `image`."""
    return channels, image[1] // POOL, image[2] // POOL
