"""`minidist tiles`: which part of each matrix is on which rank.

Proved by: tests/report/test_tiles.py
"""

from pathlib import Path
from typing import Annotated

from minidist.commands.command import Option, Result, command_line, json_or_table, say
from minidist.commands.flags import picture_file
from minidist.core.base.errors import UsageError


@json_or_table
def tiles(
    model: Annotated[str, Option(help="gpt or llama")] = "gpt",
    tp: Annotated[int, Option(help="tensor-parallel ranks")] = 2,
    width: Annotated[int, Option(help="width of the model")] = 16,
    heads: Annotated[int, Option(help="attention heads")] = 4,
    kv_heads: Annotated[int | None, Option(help="key-value heads of the llama (default: as many as heads)")] = None,
    vocab: Annotated[int, Option(help="words; padded to a multiple of --tp")] = 10,
    experts: Annotated[int, Option(help="experts in place of the gpt's MLP")] = 0,
    ep: Annotated[int, Option(help="ranks among which the experts are divided")] = 1,
    rank: Annotated[int, Option(help="the rank whose tiles the table lists")] = 0,
    output: Annotated[
        Path | None,
        Option("--output", "-o", help="draw all ranks' tiles into an .svg, .pdf or .png file", callback=picture_file),
    ] = None,
) -> Result:
    """Print which tile of each matrix of a layer is on which rank, under tensor and expert parallelism."""
    from minidist.report.frame import save
    from minidist.report.tiles import model_tiles, tiles_figure, tiles_table

    placed = model_tiles(model, tp, width, heads, kv_heads, vocab, experts, ep)
    if not 0 <= rank < tp * ep:
        raise UsageError(f"--rank {rank}; there are {tp * ep} ranks, 0..{tp * ep - 1}")
    if output:
        title = f"a {model} layer on {tp * ep} ranks" + (
            f": {ep} share {experts} experts, {tp} a layer" if experts else ""
        )
        say(f"written: {save(tiles_figure(placed, title=title, command=command_line()), output)}")

    # Of each matrix its shape, and the box of every rank's tile.
    value = {each.name: {"shape": each.shape, "boxes": each.boxes} for each in placed}
    return Result(value, lambda: print(tiles_table(placed, rank)))
