"""The tiles picture shows what the ranks hold: the boxes cover every element, by as many ranks as the layout says."""

import json

import numpy as np
import pytest

from minidist.commands.app import run_words
from minidist.core.base.errors import UsageError
from minidist.report.tiles import model_tiles, tiles_figure, tiles_table
from tests.cases import each

CASES = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 3, "heads": 6, "width": 24},
    {"tp": 4, "vocab": 13},
    {"model": "llama", "tp": 4, "heads": 8, "kv_heads": 2},
    {"tp": 2, "experts": 4, "ep": 2},
    {"tp": 1, "experts": 4, "ep": 4},
    {"tp": 2, "experts": 4, "ep": 2, "model": "llama"},
]


@each("case", CASES, ids=str)
def test_every_element_is_somewhere(case):
    ranks = case["tp"] * case.get("ep", 1)
    for tiles in model_tiles(**case):
        count = np.zeros(tiles.shape, int)
        for mine in tiles.boxes:
            for box in mine:
                count[tuple(slice(*pair) for pair in box)] += 1
        sizes = {"tp": case["tp"], "ep": case.get("ep", 1)}
        cut = np.prod([sizes[axis] for axis in tiles.layout.axes]) / tiles.layout.copies if tiles.layout.axes else 1
        assert (count == ranks / cut).all(), tiles.name


def test_a_fused_matrix_has_three_blocks_and_shared_heads_two_owners():
    fused = next(each for each in model_tiles(tp=2) if each.name.endswith("c_attn.weight"))
    assert fused.boxes[0] == (((0, 16), (0, 8)), ((0, 16), (16, 24)), ((0, 16), (32, 40)))
    shared = next(each for each in model_tiles("llama", 4, heads=8, kv_heads=2) if "k_proj" in each.name)
    assert sorted(shared.owners.values()) == [[0, 1], [2, 3]]
    assert "each tile on 2 ranks" in tiles_table([shared])


@each("case", CASES, ids=str)
def test_a_rectangle_for_each_tile(case):
    tiles = model_tiles(**case)
    figure = tiles_figure(tiles, command="minidist tiles")
    drawn = [artist.get_gid() for artist in figure.axes[0].patches]
    for tile in tiles:
        if tile.layout.axes or len(tile.shape) > 1:
            rectangles = sum(box[0][1] - box[0][0] if len(box) > 2 else 1 for box in tile.owners)
            assert drawn.count(tile.name) == rectangles, tile.name
        else:
            assert tile.name not in drawn


def test_the_command(tmp_path, capsys):
    assert run_words(["tiles", "--tp", "2", "--json", "-o", str(tmp_path / "tiles.svg")]) == 0
    boxes = json.loads(capsys.readouterr().out)["transformer.h.0.mlp.c_fc.weight"]["boxes"]
    assert boxes == [[[[0, 16], [0, 32]]], [[[0, 16], [32, 64]]]]
    assert "c_attn.weight" in (tmp_path / "tiles.svg").read_text()


def test_what_cannot_be_cut_is_said():
    with pytest.raises(UsageError, match=r"4 heads of .* cannot be divided among 3"):
        model_tiles(tp=3)
    with pytest.raises(UsageError, match=r"--model 'lama' .did you mean 'llama'"):
        model_tiles("lama")
    with pytest.raises(UsageError, match="add --experts"):
        model_tiles(ep=2)


@each(
    ("case", "sentence"),
    [
        ({"width": 0}, "--width 0; it must be at least 1"),
        ({"tp": 0}, "--tp 0; it must be at least 1"),
        ({"vocab": -3}, "--vocab -3"),
        ({"heads": 0}, "--heads 0"),
        ({"experts": -1}, "--experts -1; it must be at least 0"),
        ({"experts": 2, "ep": 0}, "--ep 0"),
        ({"kv_heads": 2}, "--kv-heads 2 belongs to --model llama, not to gpt"),
    ],
)
def test_sizes_that_are_none_are_refused(case, sentence):
    with pytest.raises(UsageError, match=sentence):
        model_tiles(**case)
