"""The towers of multimodal models, of vision and audio: how many parameters stand before the language model.

A tower cuts a picture into patches, passes them through an encoder, and projects what comes out to the width of the
language model, in most models after it has merged squares of neighbours. Each function returns a number of parameters,
for the keys of the whole file, those of its vision_config, and the width of the language model.

Proved by: tests/planning/test_families.py
"""

from collections.abc import Callable, Mapping

from minidist.planning.config_keys import Keys
from minidist.planning.parts import mlp


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + bias * outputs


def _layer(
    width: int, inner: int, bias: bool = True, norms: int = 4, gated: bool = False, mlp_bias: bool = True
) -> int:
    """Return the parameters of an encoder's layer. norms: in multiples of the width; two with biases have 4."""
    return 4 * _linear(width, width, bias) + mlp(width, inner, gated, mlp_bias).total + norms * width


def _side(keys: Keys, key: str) -> int:
    """Return a number of pixels, of a square or of a list of two equal sides."""
    value = keys.get(key)
    return int(value[0]) if isinstance(value, list) and value and isinstance(value[0], int) else keys.size(key)


def _patches(vision: Keys, width: int, channels: str = "in_channels", bias: bool = True) -> int:
    """Return the parameters of the embedding of patches of pictures, or of pairs of them where they are videos."""
    frames = _side(vision, "temporal_patch_size") if "temporal_patch_size" in vision.defaults else 1
    return _linear(vision.size(channels) * frames * _side(vision, "patch_size") ** 2, width, bias)


def qwen3_vl(file: Keys, vision: Keys, text: int) -> int:
    w, squares = vision.size("hidden_size"), vision.size("spatial_merge_size") ** 2
    merger = _linear(squares * w, squares * w) + _linear(squares * w, vision.size("out_hidden_size"))
    deep = len(vision.items("deepstack_visual_indexes", int) or []) * (merger + 2 * squares * w)
    layers = vision.size("depth") * _layer(w, vision.size("intermediate_size"))
    return _patches(vision, w) + vision.size("num_position_embeddings") * w + layers + merger + 2 * w + deep


def qwen2_vl(file: Keys, vision: Keys, text: int) -> int:
    w, squares = vision.size("embed_dim"), vision.size("spatial_merge_size") ** 2
    layers = vision.size("depth") * _layer(w, int(w * vision.number("mlp_ratio")))
    merger = 2 * w + _linear(squares * w, squares * w) + _linear(squares * w, vision.size("hidden_size"))
    return _patches(vision, w, bias=False) + layers + merger


def qwen2_5_vl(file: Keys, vision: Keys, text: int) -> int:
    w, squares = vision.size("hidden_size"), vision.size("spatial_merge_size") ** 2
    layers = vision.size("depth") * _layer(w, vision.size("intermediate_size"), norms=2, gated=True)
    merger = w + _linear(squares * w, squares * w) + _linear(squares * w, vision.size("out_hidden_size"))
    return _patches(vision, w, bias=False) + layers + merger


def gemma3(file: Keys, vision: Keys, text: int) -> int:
    w, inner = vision.size("hidden_size"), vision.size("intermediate_size")
    positions = (_side(vision, "image_size") // _side(vision, "patch_size")) ** 2
    layers = vision.size("num_hidden_layers") * _layer(w, inner)
    # The head that pools the patches is built, though the language model does not use it.
    head = w + 4 * _linear(w, w) + 2 * w + mlp(w, inner, False, True).total if vision.flag("vision_use_head") else 0
    return _patches(vision, w, "num_channels") + positions * w + layers + 2 * w + head + w * text + w


def gemma4(file: Keys, vision: Keys, text: int) -> int:
    # A file without a tower has null for it, or no key; an empty object is a tower of the default sizes.
    towers = 0 if file.content.get("vision_config") is None else _gemma4_vision(vision, text)
    audio = file.content.get("audio_config")
    return towers if audio is None else towers + _gemma4_audio(file.inside("audio_config"), text)


def _gemma4_audio(audio: Keys, text: int) -> int:
    w, out = audio.size("hidden_size"), audio.size("output_proj_dims")
    first, second = map(int, (audio.items("subsampling_conv_channels", int) or [0, 0])[:2])
    strided = 10 * first + 9 * first * second + second + first // 4 * second * w  # two convolutions of 3 x 3

    # A Conformer's layer: two MLPs, attention with relative positions, and a gated convolution.
    attention = 5 * w * w + w // audio.size("num_attention_heads")
    convolution = 3 * w * w + audio.size("conv_kernel_size") * w
    layer = 2 * mlp(w, 4 * w, False).total + attention + convolution + 9 * w
    return strided + audio.size("num_hidden_layers") * layer + _linear(w, out) + out * text


def _gemma4_vision(vision: Keys, text: int) -> int:
    w, head, inner = vision.size("hidden_size"), vision.size("head_dim"), vision.size("intermediate_size")
    q, kv = vision.size("num_attention_heads") * head, vision.size("num_key_value_heads") * head
    attention = 2 * w * (q + kv) + 2 * head
    layers = vision.size("num_hidden_layers") * (attention + mlp(w, inner).total + 4 * w)
    patches = 3 * vision.size("patch_size") ** 2 * w + 2 * vision.size("position_embedding_size") * w
    return patches + layers + w * text


def glm4v(file: Keys, vision: Keys, text: int) -> int:
    w, out, inner = vision.size("hidden_size"), vision.size("out_hidden_size"), vision.size("intermediate_size")
    positions = (_side(vision, "image_size") // _side(vision, "patch_size")) ** 2
    layer = _layer(w, out, False, norms=2, gated=True, mlp_bias=False) + 3 * w * vision.flag("attention_bias")
    layers = vision.size("depth") * layer
    squares = vision.size("spatial_merge_size") ** 2
    merger = _linear(squares * w, out) + _linear(out, out, False) + 2 * out + mlp(out, inner).total
    return positions * w + _patches(vision, w) + layers + merger + 2 * w


def kimi_k25(file: Keys, vision: Keys, text: int) -> int:
    w = vision.size("hidden_size")
    positions = vision.size("pos_emb_height") * vision.size("pos_emb_width")
    layers = vision.size("num_hidden_layers") * _layer(w, vision.size("intermediate_size"))
    sides = vision.items("merge_kernel_size", int) or [2, 2]
    merged = sides[0] * sides[-1] * w
    projector = 2 * file.size("projection_hidden_size", w) + _linear(merged, merged) + _linear(merged, text)
    return _linear(3 * vision.size("patch_size") ** 2, w) + positions * w + layers + 2 * w + projector


def minimax_m3(file: Keys, vision: Keys, text: int) -> int:
    w, inner = vision.size("hidden_size"), file.size("projector_hidden_size")
    layers = vision.size("num_hidden_layers") * _layer(w, vision.size("intermediate_size"))
    merged = text * vision.size("spatial_merge_size") ** 2
    projector = _linear(w, inner) + _linear(inner, text) + _linear(merged, inner) + _linear(inner, text)
    return _patches(vision, w, "num_channels", False) + 2 * w + layers + projector


def step3p7(file: Keys, vision: Keys, text: int) -> int:
    w = vision.size("hidden_size")
    # A layer scales what it adds, and two strided convolutions make fewer and wider patches.
    layers = vision.size("num_hidden_layers") * _layer(w, int(w * vision.number("mlp_ratio")), norms=6)
    positions = (vision.size("image_size") // vision.size("patch_size")) ** 2
    fewer = _linear(9 * w, 2 * w) + _linear(9 * 2 * w, 4 * w)
    return (
        _patches(vision, w, "num_channels", False)
        + positions * w
        + 2 * w
        + layers
        + fewer
        + _linear(4 * w, text, file.flag("projector_bias"))
    )


def pixtral(file: Keys, vision: Keys, text: int) -> int:
    w, squares = vision.size("hidden_size"), file.size("spatial_merge_size") ** 2
    layer = _layer(w, vision.size("intermediate_size"), False, norms=2, gated=True, mlp_bias=False)
    bias = file.flag("multimodal_projector_bias")
    projector = w + _linear(squares * w, w, False) + _linear(w, text, bias) + _linear(text, text, bias)
    return _patches(vision, w, "num_channels", False) + w + vision.size("num_hidden_layers") * layer + projector


# By the name that families.toml has for each.
TOWERS: Mapping[str, Callable[[Keys, Keys, int], int]] = {
    tower.__name__: tower
    for tower in (qwen3_vl, qwen2_vl, qwen2_5_vl, gemma3, gemma4, glm4v, kimi_k25, minimax_m3, step3p7, pixtral)
}
