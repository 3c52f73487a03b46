"""Reads the `config.json` that Hugging Face stores next to a model's weights into an `Architecture`.

The count is that of the module that `transformers` 5.24 makes of the file, to the last parameter: the language model
(AutoModelForCausalLM) where it has one of this kind, else the model with its vision tower (AutoModel), whose output
projection is planned and not counted. What a kind of model is made of is a row of families.toml. A kind without a row
is counted by `transformers` itself, if it is installed (transformers_count.py).

Proved by: tests/planning/test_architecture.py, tests/planning/test_families.py
"""

from pathlib import Path

from minidist.base.errors import UsageError, nearest, quoted_path
from minidist.base.read_file import read_json
from minidist.planning.architecture import Architecture, checked, named
from minidist.planning.config_keys import REMEDY, Keys, shown
from minidist.planning.decoder import architecture_of
from minidist.planning.family import families

# What a sentence calls the fields of an Architecture.
NAMES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "inner": "intermediate_size",
    "kv_heads": "num_key_value_heads",
    "top_k": "num_experts_per_tok",
    "experts": "num_local_experts",
    "head_size": "head_dim",
}


def read_model(name: str) -> Architecture:
    """Return the architecture of a config.json, or of a published model; UsageError for an unknown name."""
    return read_architecture(name) if name.endswith(".json") else named(name)


def read_architecture(path: str | Path) -> Architecture:
    """Return the architecture that a config.json describes; UsageError for one that cannot be counted."""
    content = read_json(path, "the model file", REMEDY)
    file = quoted_path(path)
    if not isinstance(content, dict):
        raise UsageError(f"the model file {file} is not a JSON object; {REMEDY}")
    kind = content.get("model_type")
    if kind is None:
        raise UsageError(f"{file} has no key 'model_type'; add it, such as 'llama', or {REMEDY}")
    if not isinstance(kind, str):
        raise UsageError(f"model_type {shown(kind)} in {file} is not a string; it must be a kind such as 'llama'")
    if kind not in families():
        # Imported here because hardly any file needs it.
        from minidist.planning.transformers_count import count_by_building

        return count_by_building(kind, content, file, nearest(kind, families()))
    keys = Keys(content, file, kind)
    model = architecture_of(keys)
    # What a sentence calls the sizes: their keys in the file, which a row may name otherwise.
    row = families()[kind]
    names = {field: row.get(field) or key for field, key in NAMES.items()}
    if "text" not in row:
        names = {field: keys.name(key) for field, key in names.items()}
    if row.get("head_dim") is False:
        del names["head_size"]
    return checked(model, names, f" in {file}")
