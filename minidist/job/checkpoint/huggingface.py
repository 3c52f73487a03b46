"""Folders of Hugging Face: config.json and weights as safetensors, read by --init-from and written by --save-hf.

    DIR/config.json                          the architecture
    DIR/model.safetensors                    all weights; of a large model instead
    DIR/model-00001-of-00003.safetensors     a part of them, and
    DIR/model.safetensors.index.json         which file has which tensor
    DIR/shard-00001-model-00001-of-00001.safetensors    or a part of every tensor, as torch.distributed.checkpoint
                                             writes them; DCP_SHARDING_INFO in the file says where the parts begin

The names and shapes of our parameters are those of `GPT2LMHeadModel` and `LlamaForCausalLM`, so nothing is transposed
or renamed; files of GPT-2 without the prefix "transformer." are read, too. Every key of config.json that changes what
the model computes must say what minidist's model does, or the folder is refused with the key's name.

Nothing is sent. Every rank that loads a folder reads all tensors of it. Writing reads a checkpoint, which the ranks
have written together, and holds one file's tensors at a time.

Source of the formats: the documentation of transformers, "save_pretrained", of safetensors, "Format", and of
torch.distributed.checkpoint, HuggingFaceStorageWriter.
Proved by: tests/checkpoint/test_huggingface.py
"""

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, quoted, quoted_path, reason
from minidist.base.files import writing
from minidist.base.half import named_dtype
from minidist.base.read_file import parse_json, read_json
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.checkpoint.saved_model import saved_config, vocabulary_of
from minidist.job.config.models import llama_inner
from minidist.job.config.train_config import TrainConfig, flag
from minidist.techniques import history

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9  # of tensors in a file at most, as transformers' default
KINDS = {"gpt2": "gpt", "llama": "llama"}  # model_type -> --model
REMEDY = "write the folder with save_pretrained(DIR, safe_serialization=True), or with train --save-hf"

SHARDING = "DCP_SHARDING_INFO"  # of a file with parts of tensors: tensor -> {"saved_offsets": [...]}
SHARD = "shard-{:05d}-model-00001-of-00001.safetensors"
# What --save-hf writes before config.json: a folder with no other files is one that it did not finish.
WRITTEN = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|shard-\d+-model-00001-of-00001\.safetensors")

# Tensors that older files hold in addition to the parameters: masks, and the table of rotary angles.
NOT_PARAMETERS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq")


def is_huggingface_folder(path: str | Path) -> bool:
    """Return whether a folder holds a config.json, and no checkpoint of minidist."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and not ((folder / "latest").exists() or (folder / "metadata.json").exists())


def described(config: TrainConfig, vocabulary: int) -> dict[str, Any]:
    """Return the config.json of a job's model, with every key that changes what it computes."""
    common = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, "torch_dtype": "float32"}
    if config.model == "gpt":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": config.layers,
            "n_embd": config.width,
            "n_head": config.heads,
            "n_positions": config.context,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "resid_pdrop": config.optional("dropout") or 0.0,
            "embd_pdrop": config.optional("dropout") or 0.0,
            "attn_pdrop": config.optional("attention_dropout") or 0.0,
            **common,
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.width // config.heads,
        "intermediate_size": llama_inner(config),
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "attention_dropout": config.optional("attention_dropout") or 0.0,
        **common,
    }


# A folder without one of these means what `described` writes; without `rms_norm_eps` or `num_key_value_heads` it
# means another value, and every other key of `described` must be there.
OPTIONAL = (
    "n_inner",
    "activation_function",
    "layer_norm_epsilon",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "head_dim",
)
SETTINGS = {  # key -> the setting that must be given the same value
    "n_layer": "layers",
    "n_embd": "width",
    "n_head": "heads",
    "n_positions": "context",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "max_position_embeddings": "context",
}
IGNORED = ("architectures", "bos_token_id", "eos_token_id", "torch_dtype", "resid_pdrop", "embd_pdrop", "attn_pdrop")


class HuggingFaceFolder:
    """A folder whose files have been found; UsageError names what is missing or wrong."""

    def __init__(self, path: str) -> None:
        self.path, self.where = Path(path), f"--init-from {quoted_path(path)}"
        content = read_json(self.path / CONFIG, "--init-from", REMEDY)
        if not isinstance(content, dict):
            raise UsageError(f"{self.where}: {CONFIG} is not a JSON object; {REMEDY}")
        self.content: dict[str, Any] = content
        if not isinstance(kind := content.get("model_type"), str) or kind not in KINDS:
            raise UsageError(
                f"{self.where}: model_type in {CONFIG} is {quoted(kind)}; it must be one of {', '.join(KINDS)}"
            )
        self.model = KINDS[kind]
        self.pieces = self._pieces()

    def check(self, config: TrainConfig) -> None:
        """Raise UsageError unless the folder's model is the job's; the vocabulary is compared when it is loaded."""
        if config.model != self.model or config.experts:
            raise UsageError(
                f"{self.where} holds a {self.model}, and this job trains --model {config.model}"
                + (" with --experts" if config.experts else "")
                + f"; train --model {self.model}" * (config.model != self.model)
                + "; leave out --experts" * bool(config.experts)
            )
        wanted = described(config, 0)
        for key in (key for key in wanted if key not in IGNORED and key not in ("vocab_size", "attention_dropout")):
            found = self._value(key, wanted)
            if found == wanted[key]:
                continue
            setting = SETTINGS.get(key)
            # A rotary model has no table of positions: a shorter context than the file's is the same model.
            if key == "max_position_embeddings" and isinstance(found, int) and found >= wanted[key]:
                continue
            raise UsageError(
                f"{self.where}: {key} in {CONFIG} is {quoted(found)}, and this job's model has {wanted[key]!r}; "
                + (f"train with {flag(setting)} {found}" if setting else "minidist has no such model, so take another")
            )

    def load(self, model: Any) -> None:
        """Give a whole model the folder's weights, converted to the model's own dtype."""
        names, parameters = set(self.pieces), list(model.parameters())
        for parameter in parameters:
            name = parameter.name if parameter.name in names else parameter.name.removeprefix("transformer.")
            if name not in names:
                raise UsageError(f"{self.where} has no tensor {quoted(parameter.name)}; {REMEDY}")
            names.discard(name)
            value = self._tensor(name)
            if value.shape != parameter.shape:
                hint = "; its vocabulary must be that of --data" if value.shape[1:] == parameter.shape[1:] else ""
                raise UsageError(
                    f"{self.where}: tensor {quoted(name)} has the shape {value.shape}, and this job's model has"
                    f" {parameter.shape}{hint}"
                )
            xp.store(parameter.data, value.astype(parameter.dtype))
            parameter.updated()

        # A head that is stored in addition to the embedding to which it is tied must be equal to it.
        if "lm_head.weight" in names and self.model == "gpt":
            names.discard("lm_head.weight")
            table = next(p for p in parameters if p.name.endswith("wte.weight"))
            if not np.array_equal(self._tensor("lm_head.weight").astype(table.dtype), table.data):
                raise UsageError(f"{self.where}: lm_head.weight is not the embedding; minidist's gpt ties the two")
        unknown = sorted(name for name in names if not NOT_PARAMETERS.fullmatch(name))
        if unknown:
            raise UsageError(
                f"{self.where} has {len(unknown)} tensors that the model does not have, such as {quoted(unknown[0])}"
            )

    def _value(self, key: str, wanted: Mapping[str, Any]) -> Any:
        """Return what config.json says of a key; what is missing has the value that transformers takes."""
        content = self.content
        # transformers 5 keeps the rotary settings in a separate table.
        rope = content.get("rope_parameters")
        if key in ("rope_theta", "rope_scaling") and isinstance(rope, dict):
            scaled = rope if rope.get("rope_type", "default") != "default" else None
            return rope.get("rope_theta", wanted["rope_theta"]) if key == "rope_theta" else scaled
        found = content.get(key)
        if found is None and key in OPTIONAL:
            found = wanted[key]
        elif found is None:
            missing = {"num_key_value_heads": content.get("num_attention_heads"), "rms_norm_eps": 1e-6}
            found = missing.get(key)
        if key == "n_inner" and found == 4 * wanted["n_embd"]:
            return None
        if key == "activation_function" and found == "gelu_pytorch_tanh":  # another name of the same function
            return "gelu_new"
        return found

    def _files(self) -> list[str]:
        """Return the names of the files with tensors: those of the index, the only file, or the parts."""
        if (self.path / INDEX).is_file():
            index = read_json(self.path / INDEX, "--init-from", REMEDY)
            table = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
                raise UsageError(f"{self.where}: {INDEX} has no weight_map of tensors to files; {REMEDY}")
            return sorted(set(table.values()))
        parts = sorted(path.name for path in self.path.glob("shard-*.safetensors"))
        return parts if parts and not (self.path / SINGLE).is_file() else [SINGLE]

    def _pieces(self) -> dict[str, list[tuple[Path, list[int]]]]:
        """Return for every tensor the files that have it or a part of it, and where in the tensor that part begins."""
        from safetensors import SafetensorError, safe_open

        # A file's own header says what is in it; the index may be another model's.
        result: dict[str, list[tuple[Path, list[int]]]] = {}
        for name in self._files():
            path = self.path / name
            if path.parent != self.path or not path.is_file():
                raise UsageError(f"{self.where} has no file {quoted(name)}; {REMEDY}")
            try:
                with safe_open(path, framework="numpy") as file:
                    begins = parse_json((file.metadata() or {}).get(SHARDING, "{}"))
                    for key in file.keys():  # noqa: SIM118
                        shape = file.get_slice(key).get_shape()
                        first = begins[key]["saved_offsets"] if begins else [0] * len(shape)
                        if len(first) != len(shape) or not all(type(n) is int and n >= 0 for n in first):
                            raise ValueError(f"the part of {key} begins at {first}")
                        result.setdefault(key, []).append((path, first))
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{self.where}: file {quoted(name)} is damaged ({reason(error)}); copy it again"
                ) from None
        return result

    def _tensor(self, name: str) -> np.ndarray:
        """Return one tensor, read from its files."""
        from safetensors import SafetensorError, safe_open

        named_dtype("bfloat16")  # which NumPy does not know before
        values: list[np.ndarray] = []
        for path, _ in self.pieces[name]:
            try:
                with safe_open(path, framework="numpy") as file:
                    values.append(np.asarray(file.get_tensor(name)))
            except (SafetensorError, OSError, ValueError, TypeError) as error:
                where = f"{self.where}: tensor {quoted(name)} of {quoted(path.name)}"
                raise UsageError(f"{where} cannot be read ({reason(error)}); copy the file again") from None
        if len(values) == 1 and not any(self.pieces[name][0][1]):
            return values[0]

        # The parts together are as large as the tensor, and each element is in one of them.
        begins = [np.array(first) for _, first in self.pieces[name]]
        shape = np.max([first + value.shape for first, value in zip(begins, values, strict=True)], axis=0)
        if sum(value.size for value in values) != prod(map(int, shape)):
            raise UsageError(f"{self.where}: parts of tensor {quoted(name)} are missing or there twice; copy all files")
        whole, filled = np.empty(shape, values[0].dtype), np.zeros(shape, bool)
        for first, value in zip(begins, values, strict=True):
            place = tuple(slice(a, a + n) for a, n in zip(first.tolist(), value.shape, strict=True))
            whole[place], filled[place] = value, True
        if not filled.all():
            raise UsageError(f"{self.where}: parts of tensor {quoted(name)} overlap; copy all files of one checkpoint")
        return whole


def check_saving_huggingface(config: TrainConfig, folder: Path) -> None:
    """Raise UsageError when --save-hf has nothing to write, or transformers has no such model."""
    if config.save is None:
        raise UsageError("--save-hf writes the weights of the last checkpoint; add --save DIR, where the ranks save it")
    if config.model not in KINDS.values() or config.experts:
        kind = f"--model {quoted(config.model, marks=False)}" + " with --experts" * bool(config.experts)
        raise UsageError(f"--save-hf writes a gpt or a llama without experts, and this job trains {kind}; leave it out")
    if folder.exists() and (not folder.is_dir() or any(not WRITTEN.fullmatch(file.name) for file in folder.iterdir())):
        raise UsageError(f"--save-hf {quoted_path(folder)} is not an empty folder; give the name of a new one")


def only_written(config: TrainConfig) -> bool:
    """Return whether the job to resume has trained all its steps, so that only the folder of --save-hf is left."""
    if config.save is None or not config.resume or history(config).from_step is not None:
        return False
    return Checkpoint(config.save).step >= config.steps


def _files_of(nbytes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """Return {file: tensors}: tensors in their order, into the next file when the last one is full."""
    parts: list[list[str]] = [[]]
    for name in nbytes:
        if parts[-1] and sum(nbytes[other] for other in parts[-1]) + nbytes[name] > limit:
            parts.append([])
        parts[-1].append(name)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{n:05d}-of-{len(parts):05d}.safetensors": names for n, names in enumerate(parts, 1)}


def write_huggingface(
    checkpoint: Checkpoint, folder: Path, file_bytes: int = FILE_BYTES, shards: int | None = None
) -> None:
    """Write a checkpoint's weights as a folder of Hugging Face. file_bytes: of tensors in a file at most.

    shards: the number of files, each with a part of the rows of every tensor, as torch.distributed.checkpoint does.
    """
    from safetensors.numpy import save_file

    config = saved_config(checkpoint)
    content = described(config, vocabulary_of(checkpoint, config))
    weights = {name.removeprefix("weights/"): name for name in checkpoint.tensors if name.startswith("weights/")}
    nbytes = {
        name: prod(checkpoint.tensors[stored]["shape"]) * named_dtype(checkpoint.tensors[stored]["dtype"]).itemsize
        for name, stored in weights.items()
    }
    content["torch_dtype"] = str(checkpoint.tensors[next(iter(weights.values()))]["dtype"])

    files = _files_of(nbytes, file_bytes) if shards is None else {}

    with writing("the model", folder, "make room there, or choose another --save-hf"):
        folder.mkdir(parents=True, exist_ok=True)
        for left in [file for file in folder.iterdir() if WRITTEN.fullmatch(file.name)]:
            left.unlink()  # of a process that was ended, and that may have had another number of files
        if shards is not None:
            for number in range(shards):
                _write_shard(checkpoint, weights, folder / SHARD.format(number + 1), number, shards)
        for file, names in files.items():
            tensors = {name: checkpoint.tensor(weights[name]) for name in names}
            save_file(tensors, folder / file, metadata={"format": "pt"})
        if len(files) > 1:
            where = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        # Last, because a folder with it is taken for whole.
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_shard(checkpoint: Checkpoint, weights: Mapping[str, str], path: Path, number: int, shards: int) -> None:
    """Write shard `number` of `shards`: of each tensor the rows that DTensor's Shard(0) gives to this rank."""
    from safetensors.numpy import save_file

    tensors, begins = {}, {}
    for name, stored in weights.items():
        shape = checkpoint.tensors[stored]["shape"]
        rows = -(-shape[0] // shards)
        first, stop = min(number * rows, shape[0]), min((number + 1) * rows, shape[0])
        if first < stop:
            each = prod(shape[1:])
            tensors[name] = checkpoint.read(stored, first * each, stop * each).reshape(stop - first, *shape[1:])
            begins[name] = {"saved_offsets": [first, *[0] * (len(shape) - 1)]}
    save_file(tensors, path, metadata={"format": "pt", "DCP_VERSION": "1.0", SHARDING: json.dumps(begins)})
