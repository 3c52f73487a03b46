"""The tiles picture: which tile of each matrix of a layer is on which rank.

A model is built and cut by `parallelize_module` on simulated ranks, and the boxes of the tiles' layouts
(`parallel.tensor.boxes`) are what is coloured, so a fused Q|K|V shows its three blocks and shared key-value heads their
two owners.

Proved by: tests/report/test_tiles.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import MAX_COUNT, MAX_SWEPT_RANKS, check_ranks
from minidist.comm import SimWorld
from minidist.core.base.layout import Layout
from minidist.core.comm import Comm, init_device_mesh
from minidist.core.nn import GPT, GPTConfig, Module
from minidist.core.parallel.model_parallel import apply_expert_parallel, apply_tensor_parallel
from minidist.nn import Llama, LlamaConfig
from minidist.parallel.tensor import boxes
from minidist.report.frame import Figure, finish, new_panel, patch
from minidist.report.palette import PALETTE, RANKS

MAX_BYTES = 10**9  # of all ranks' layers together
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tiles:
    """One parameter: its global shape, and for each rank the boxes of it that the rank holds."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]
    layout: Layout

    @property
    def owners(self) -> dict[Box, list[int]]:
        """Return which ranks hold each box."""
        result: dict[Box, list[int]] = {}
        # Replicated tiles have several owners; empty tiles have none.
        for rank, mine in enumerate(self.boxes):
            for box in mine:
                if all(start < stop for start, stop in box):
                    result.setdefault(box, []).append(rank)
        return result

    def kind(self) -> str:
        """Return in words how it is cut."""
        if not self.layout.axes:
            return "whole on every rank"
        words = [f"dim {dim} over {axis}" for axis, dim in zip(self.layout.axes, self.layout.dims, strict=True)]
        blocks = f" in each of {self.layout.blocks} blocks" if self.layout.blocks > 1 else ""
        padding = f", padded by {self.layout.padding}" if self.layout.padding else ""
        copies = f", each tile on {self.layout.copies} ranks" if self.layout.copies > 1 else ""
        return " and ".join(words) + blocks + padding + copies


def tiles_of(build: Callable[[], Module], cut: Callable[[Module, Any], Module], mesh: Mapping[str, int]) -> list[Tiles]:
    """Return the tiles of `cut(build(), device_mesh)` over a mesh {axis: ranks}; tied parameters once."""

    def main(comm: Comm) -> list[tuple[str, Layout, tuple[Box, ...]]]:
        device_mesh = init_device_mesh(comm, list(mesh.values()), list(mesh))
        model = cut(build(), device_mesh)
        layouts = [(name, p.layout or Layout(tuple(p.shape))) for name, p in model.named_parameters()]
        return [(name, layout, tuple(box for box, _ in boxes(layout, device_mesh))) for name, layout in layouts]

    # Every simulated rank builds and cuts the model, as a job would, and reports the boxes that it holds.
    each = SimWorld(prod(mesh.values()), record=False).run(main)
    return [
        Tiles(name, layout.global_shape, tuple(rows[i][2] for rows in each), layout)
        for i, (name, layout, _) in enumerate(each[0])
    ]


def model_tiles(
    model: str = "gpt",
    tp: int = 2,
    width: int = 16,
    heads: int = 4,
    kv_heads: int | None = None,
    vocab: int = 10,
    experts: int = 0,
    ep: int = 1,
) -> list[Tiles]:
    """Return the tiles of a one-layer GPT or Llama of these sizes, tp ranks per layer and ep ranks for its experts."""
    # [1] Sizes that cannot be, and flags that do not belong to the model.
    if model not in ("gpt", "llama"):
        raise UsageError(f"--model {quoted(model)}{nearest(model, ('gpt', 'llama'))}; it must be gpt or llama")
    for flag, size, least in (
        ("tp", tp, 1),
        ("width", width, 1),
        ("heads", heads, 1),
        ("kv-heads", kv_heads, 1),
        ("vocab", vocab, 1),
        ("experts", experts, 0),
        ("ep", ep, 1),
    ):
        if size is not None and not least <= size <= MAX_COUNT:
            raise UsageError(f"--{flag} {quoted(size)}; it must be at least {least} and at most {MAX_COUNT:,}")
    check_ranks(tp, "--tp", MAX_SWEPT_RANKS)
    check_ranks(tp * ep, "--tp times --ep", MAX_SWEPT_RANKS)
    # Every rank builds the whole layer before it is cut.
    needed = 4 * tp * ep * (2 * vocab + (4 + 8 * max(1, experts)) * width) * width
    if needed > MAX_BYTES:
        raise UsageError(
            f"--width {quoted(width)} --vocab {quoted(vocab)} on {tp * ep} ranks need {needed / 1e9:.3g} GB; a picture"
            f" takes at most {MAX_BYTES / 1e9:g} GB, so use smaller sizes"
        )
    if kv_heads is not None and model != "llama":
        raise UsageError(f"--kv-heads {kv_heads} belongs to --model llama, not to {model}; leave it out")
    if ep > 1 and not experts:
        raise UsageError(f"--ep {ep} divides experts, and this layer has none; add --experts {ep}, or leave --ep out")

    # [2] The model, whole on every rank.
    def build() -> Module:
        if model == "gpt":
            return GPT(GPTConfig(vocab, 8, width, 1, heads, n_experts=experts))
        return Llama(LlamaConfig(vocab, width, 2 * width, 1, heads, kv_heads, 8, num_local_experts=experts))

    # [3] Cut it: the experts over ep first, then every layer over tp.
    def cut(whole: Module, mesh: Any) -> Module:
        if experts:
            whole = apply_expert_parallel(whole, mesh["ep"])
        return apply_tensor_parallel(whole, mesh["tp"])

    return tiles_of(build, cut, {"ep": ep, "tp": tp} if experts else {"tp": tp})


def tiles_table(tiles: Sequence[Tiles], rank: int = 0) -> str:
    """Return as text each parameter, how it is cut, and what `rank` holds of it."""
    width = max(len(each.name) for each in tiles)
    lines = []
    for each in tiles:
        mine = " + ".join("[" + ", ".join(f"{a}:{b}" for a, b in box) + "]" for box in each.boxes[rank])
        lines.append(f"{each.name:{width}}  {'x'.join(map(str, each.shape)):>9}  rank {rank}: {mine}  ({each.kind()})")
    return "\n".join(lines)


def tiles_figure(tiles: Sequence[Tiles], *, title: str = "", command: str = "") -> Figure:
    """Draw every matrix on one scale, its tiles coloured by rank; grey is what all ranks hold.

    A vector is a strip under its matrix; of a stack of matrices (experts) each is drawn. Vectors that all ranks hold
    are left out.
    """
    # Vectors that are whole everywhere show nothing.
    ranks = len(tiles[0].boxes)
    shown = [each for each in tiles if each.layout.axes or len(each.shape) > 1]

    # One scale for all matrices, in inches per element, so that their sizes can be compared.
    columns = _columns(shown)
    scale = HIGH / max(sum(_rows(each, 1.0) for each in column) for column in columns)  # inches per element
    widths = [max(LABEL, *(each.shape[-1] * scale for each in column)) + GAP for column in columns]
    heights = [sum(_rows(each, scale) * scale + LINE for each in column) for column in columns]
    figure, axes = new_panel(sum(widths) + 0.3, max(heights) + 1.2)
    shorts = [_short(each) for each in shown]

    # Column by column, each parameter under the one before.
    x = 0.0
    for column, width in zip(columns, widths, strict=True):
        y = 0.0
        for each in column:
            axes.text(x, y - 0.04, _label(each, shorts), fontsize=6, ha="left", va="bottom")
            _draw(axes, each, x, y, ranks, scale)
            y += _rows(each, scale) * scale + LINE
        x += width
    axes.set(xlim=(-0.05, x), ylim=(max(heights), -0.35), aspect="equal")
    axes.axis("off")
    handles = [patch(RANKS[rank % len(RANKS)], f"rank {rank}") for rank in range(min(ranks, len(RANKS)))]
    handles.append(patch(PALETTE["idle"], "whole on every rank"))
    return finish(figure, handles, command, title or f"tiles on {ranks} ranks")


HIGH, LABEL, GAP, LINE, STRIP = 2.6, 0.95, 0.15, 0.34, 0.13  # inches


def _columns(tiles: Sequence[Tiles]) -> list[list[Tiles]]:
    """Return columns of parameters: those of one module under each other, its weight, then its bias."""
    columns: dict[str, list[Tiles]] = {}
    for each in tiles:
        module, _, part = each.name.rpartition(".")
        columns.setdefault(module + part.removesuffix("weight").removesuffix("bias"), []).append(each)
    return list(columns.values())


def _short(tiles: Tiles, parts: int = 2) -> str:
    """Return the last parts of a parameter's name."""
    return ".".join(tiles.name.split(".")[-parts:])


def _label(tiles: Tiles, shorts: Sequence[str]) -> str:
    """Return a parameter's name and shape; of two with one of the short names, the module's name as well."""
    name = _short(tiles, 2 + (shorts.count(_short(tiles)) > 1))
    between = " " if len(tiles.shape) == 1 else "\n"
    return f"{name}{between}{' x '.join(map(str, tiles.shape))}"


def _rows(tiles: Tiles, scale: float) -> float:
    """Return the height in elements: a vector is a strip, a stack is its matrices with gaps."""
    strip = STRIP / scale if scale != 1.0 else 1.0
    each = max(tiles.shape[-2], strip) if len(tiles.shape) > 1 else strip
    number = tiles.shape[0] if len(tiles.shape) > 2 else 1
    return each * number * (1.08 if number > 1 else 1.0)


def _draw(axes: Any, tiles: Tiles, x: float, y: float, ranks: int, scale: float) -> None:
    """Draw the rectangles of one parameter with its corner at (x, y)."""
    from matplotlib.patches import Rectangle

    # number: matrices in a stack. pitch: inches from one to the next. row: inches of one row.
    shape = tiles.shape if len(tiles.shape) > 1 else (1, *tiles.shape)
    number = shape[0] if len(shape) > 2 else 1
    pitch = _rows(tiles, scale) * scale / number
    row = pitch / (1.08 if number > 1 else 1.0) / shape[-2]
    for box, owners in tiles.owners.items():
        # A box is (rows, columns); of a stack also the range of matrices, which comes first.
        *outer, rows, columns = box if len(box) > 1 else ((0, 1), *box)
        on_every_rank = len(owners) == ranks and ranks > 1
        colour = PALETTE["idle"] if on_every_rank else RANKS[owners[0] % len(RANKS)]
        label = "" if on_every_rank else ",".join(map(str, owners))
        wide, high = (columns[1] - columns[0]) * scale, (rows[1] - rows[0]) * row
        # One rectangle in each matrix of the stack, named by its owners where there is room.
        for layer in range(*outer[0]) if outer else (0,):
            left, top = x + columns[0] * scale, y + layer * pitch + rows[0] * row
            axes.add_patch(
                Rectangle((left, top), wide, high, facecolor=colour, edgecolor="white", linewidth=0.6, gid=tiles.name)
            )
            if label and len(label) * 0.07 <= wide and high >= 0.09:
                axes.text(left + wide / 2, top + high / 2, label, fontsize=6, ha="center", va="center")
