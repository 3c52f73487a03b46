"""Two-dimensional convolution as one node: a product of the image's patches with the kernel, laid out as a matrix.

    x (N, C, H, W)  ->  patches (N Ho Wo, kh kw C)  @  kernel (kh kw C, O)  ->  y (N, O, Ho, Wo)

The patches are kh kw times as large as the image, so they are not kept: the weight gradient makes them again.

Proved by: tests/nn/test_convolution.py
"""

from minidist.core.autograd.operators import mismatch, operand, operands
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base.errors import AutogradError


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0) -> Tensor:
    """x (N, C, H, W), weight (O, C, kh, kw), bias (O,) -> (N, O, Ho, Wo), Ho = (H + 2 padding - kh) // stride + 1.

    2 N Ho Wo O C kh kw FLOP forward, and as many for each of input gradient and weight gradient.
    """
    x, weight = operands("conv2d", x, weight)
    bias = None if bias is None else operand(bias)
    ho, wo = _output_size(x, weight, bias, stride, padding)
    (n, c, h, w), (o, _, kh, kw) = x.shape, weight.shape

    # One window per place in the kernel: which rows and columns of the padded image that place meets.
    windows = [
        (i, j, slice(i, i + stride * (ho - 1) + 1, stride), slice(j, j + stride * (wo - 1) + 1, stride))
        for i in range(kh)
        for j in range(kw)
    ]
    kept_x, kept_w, biases = x.saved(), weight.saved(), []

    # Channels last, in the kernel as in the patches: then a patch is made of whole rows of c numbers.
    def patches(values: xp.Array) -> xp.Array:
        padded = xp.zeros((n, h + 2 * padding, w + 2 * padding, c), values.dtype, values)
        padded[:, padding : padding + h, padding : padding + w] = xp.moveaxis(values, 1, -1)
        result = xp.empty((n, ho, wo, kh, kw, c), values.dtype, values)
        for i, j, rows, columns in windows:
            result[:, :, :, i, j] = padded[:, rows, columns]
        return result.reshape(n * ho * wo, kh * kw * c)

    y = patches(x.data) @ channels_last_rows(weight.data).reshape(o, -1).T
    if bias is not None:
        y += bias.data
        biases.append((bias, lambda g, out=None: xp.sum_rows(channels_last_rows(g), out)))
    y = x.save(xp.array(xp.moveaxis(y.reshape(n, ho, wo, o), -1, 1))).stored

    def grad_x(g: xp.Array) -> xp.Array:
        kernel = channels_last_rows(kept_w.data).reshape(o, -1)
        back = (channels_last_rows(g) @ kernel).reshape(n, ho, wo, kh, kw, c)
        padded = xp.zeros((n, h + 2 * padding, w + 2 * padding, c), g.dtype, g)
        for i, j, rows, columns in windows:
            padded[:, rows, columns] += back[:, :, :, i, j]
        return xp.array(xp.moveaxis(padded[:, padding : padding + h, padding : padding + w], -1, 1))

    def grad_w(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        rows = channels_last_rows(g).T @ patches(kept_x.data)
        found = xp.moveaxis(rows.reshape(o, kh, kw, c), -1, 1)
        if out is None:
            return xp.array(found)
        xp.copyto(out, found)
        return out

    flops = 2 * n * ho * wo * o * c * kh * kw

    def cost() -> tuple[int, list[tuple[int, int]]]:
        product = (flops, x.stored.nbytes + weight.stored.nbytes + y.nbytes)
        return flops, [product, product] + [(y.size, y.nbytes)] * len(biases)

    return record("conv2d", y, ((x, grad_x),), [(weight, grad_w), *biases], cost=cost)


def _output_size(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> tuple[int, int]:
    """Return (Ho, Wo); AutogradError for shapes that do not fit, and for a wrong stride or padding."""
    if x.ndim != 4 or weight.ndim != 4 or x.shape[1] != weight.shape[1]:
        raise mismatch("conv2d", x, weight, "do not fit: they must be (N, C, H, W) and (O, C, kh, kw)")
    if stride < 1 or padding < 0:
        raise AutogradError(f"conv2d: stride {stride} must be at least 1 and padding {padding} at least 0")
    (_, _, h, w), (o, _, kh, kw) = x.shape, weight.shape
    ho, wo = (h + 2 * padding - kh) // stride + 1, (w + 2 * padding - kw) // stride + 1
    if min(ho, wo) < 1:
        raise mismatch("conv2d", x, weight, f"do not fit: the kernel is larger than the image with padding {padding}")
    if bias is not None and bias.shape != (o,):
        raise mismatch(
            "conv2d", bias, weight, "do not fit: the bias must have as many elements as there are output channels"
        )
    return ho, wo


def channels_last_rows(images: xp.Array) -> xp.Array:
    """(N, C, ...) as a C-contiguous matrix (N ..., C), a view where the memory allows it.

    Sums and products of it have the same bits whatever the strides of `images` are.
    """
    rows = xp.moveaxis(images, 1, -1)
    return rows.astype(rows.dtype, order="C", copy=False).reshape(-1, images.shape[1])
