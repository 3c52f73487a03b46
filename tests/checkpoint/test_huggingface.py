"""Folders of Hugging Face: written from any layout, read into any, and what does not fit is refused."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.data import load_dataset
from minidist.job.checkpoint import Checkpoint
from minidist.job.checkpoint.huggingface import (
    CONFIG,
    INDEX,
    SINGLE,
    HuggingFaceFolder,
    check_saving_huggingface,
    write_huggingface,
)
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig, resolve_dims
from minidist.job.train.trainer import train
from minidist.techniques.initial_weights.weights import load_initial_weights
from tests.cases import each

JOB = {"layers": 2, "width": 24, "heads": 3, "context": 8, "data": "markov", "steps": 2, "global_batch": 8}
MODELS = {"gpt": {"model": "gpt"}, "llama": {"model": "llama", "kv_heads": 1}}
LAYOUTS = {"zero3": {"dp": 2, "zero": 3}, "pp": {"pp": 2, "dp": 2}, "tp": {"tp": 3}}


def run(**changes):
    config = TrainConfig.make(**{**JOB, **changes})
    return SimWorld(resolve_dims(config).ranks).run(train, config)[0]


@pytest.fixture(scope="module", params=MODELS)
def written(request, tmp_path_factory):
    """(settings of the model, folder, weights of the checkpoint), trained with ZeRO 3."""
    directory, model = tmp_path_factory.mktemp("hf"), MODELS[request.param]
    layout = {"pp": 2} if model["model"] == "llama" else {"dp": 2, "zero": 3}
    run(**model, **layout, save=str(directory / "ck"))
    checkpoint = Checkpoint(str(directory / "ck"))
    write_huggingface(checkpoint, directory / "folder")
    weights = {
        name.removeprefix("weights/"): checkpoint.tensor(name) for name in checkpoint.tensors if "weights/" in name
    }
    return model, directory / "folder", weights


def loaded(config):
    model = make_model(config, load_dataset(config.data))
    load_initial_weights(config.init_from, config, model)
    return {parameter.name: np.array(parameter.data) for parameter in model.parameters()}


def assert_loads(model, folder, weights):
    found = loaded(TrainConfig.make(**JOB, **model, init_from=str(folder)))
    assert set(found) == set(weights)
    for name, value in found.items():
        assert np.array_equal(value, weights[name]), name


def test_all_weights_come_back(written):
    model, folder, weights = written
    assert set(load_file(folder / SINGLE)) == set(weights)
    assert_loads(model, folder, weights)


def test_several_files_with_an_index(written, tmp_path):
    model, folder, weights = written
    parts = tmp_path / "parts"
    write_huggingface(Checkpoint(str(folder.parent / "ck")), parts, file_bytes=4_000)
    index = json.loads((parts / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    assert not (parts / SINGLE).exists()
    assert_loads(model, parts, weights)


@each("shards", [1, 3, 40])
def test_parts_of_every_tensor(written, shards, tmp_path):
    """Uneven rows, and with 40 shards files that have no row of the norms."""
    model, folder, weights = written
    write_huggingface(Checkpoint(str(folder.parent / "ck")), tmp_path / "parts", shards=shards)
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) == shards
    assert sum(value.nbytes for file in files for value in load_file(file).values()) == sum(
        value.nbytes for value in weights.values()
    )
    assert_loads(model, tmp_path / "parts", weights)
    if shards == 3:
        files[1].unlink()
        with pytest.raises(UsageError, match=r"are missing or there twice|overlap"):
            assert_loads(model, tmp_path / "parts", weights)


def test_damaged_parts_are_refused(written, tmp_path):
    model, folder, weights = written
    config = TrainConfig.make(**JOB, **model, init_from=str(tmp_path))
    (tmp_path / CONFIG).write_text((folder / CONFIG).read_text())
    path, name = tmp_path / "shard-00001-model-00001-of-00001.safetensors", next(iter(weights))
    begins = {key: {"saved_offsets": [0] * value.ndim} for key, value in weights.items()}
    wrong = (3, [], [0], [-1, 0], ["0", 0], [0, 0, 0], None)
    infos = [json.dumps({**begins, name: {"saved_offsets": place}}) for place in wrong]
    for info in (*infos, "[", "[1]", '{"a": 1}'):
        save_file(weights, path, metadata={"DCP_SHARDING_INFO": info})
        with pytest.raises(UsageError, match="is damaged"):
            loaded(config)


@each("layout", ["zero3", "pp", "tp"])
def test_every_layout_begins_with_the_same_weights(written, layout):
    model, folder, _ = written
    if layout == "tp" and model["model"] == "llama":
        pytest.skip("one key-value head is not cut in three")
    settings = {**model, "init_from": str(folder), "precision": "fp64", "reduction": "ordered"}
    losses = run(**settings, **LAYOUTS[layout]).losses
    alone = run(**settings).losses
    np.testing.assert_allclose(losses, alone, rtol=1e-12)
    fresh = run(**{**settings, "init_from": None}).losses
    assert abs(fresh[0] - alone[0]) > 1e-6


def test_a_llama_with_another_inner_width_is_read(tmp_path):
    run(model="llama", ffn=100, save=str(tmp_path / "ck"))
    write_huggingface(Checkpoint(str(tmp_path / "ck")), tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / CONFIG).read_text())["intermediate_size"] == 100
    found = loaded(TrainConfig.make(**JOB, model="llama", ffn=100, init_from=str(tmp_path / "hf")))
    assert found["model.layers.0.mlp.gate_proj.weight"].shape[0] == 100


def test_older_files_of_gpt2(tmp_path, written):
    """Without the prefix, with masks, with the tied head, and in 16 bits."""
    model, folder, weights = written
    if model["model"] != "gpt":
        pytest.skip("names of GPT-2")
    old = {name.removeprefix("transformer."): value.astype(np.float16) for name, value in weights.items()}
    old |= {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8), "lm_head.weight": old["wte.weight"]}
    save_file(old, tmp_path / SINGLE)
    content = json.loads((folder / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**content, "n_inner": 96, "activation_function": "gelu_pytorch_tanh"}))
    assert_loads(model, tmp_path, {name: value.astype(np.float16) for name, value in weights.items()})
    old["lm_head.weight"] = old["wte.weight"] + 1
    save_file(old, tmp_path / SINGLE)
    with pytest.raises(UsageError, match=r"lm_head\.weight is not the embedding"):
        loaded(TrainConfig.make(**JOB, **model, init_from=str(tmp_path)))


GPT_CHANGES = {
    "n_head": (2, "train with --heads 2"),
    "n_layer": (3, "train with --layers 3"),
    "n_positions": (9, "train with --context 9"),
    "activation_function": ("relu", "activation_function in config.json is 'relu'"),
    "layer_norm_epsilon": (1e-6, "layer_norm_epsilon"),
    "scale_attn_by_inverse_layer_idx": (True, "has False"),
    "model_type": ("bert", "it must be one of gpt2, llama"),
    "tie_word_embeddings": (False, "tie_word_embeddings"),
}
LLAMA_CHANGES = {
    "num_key_value_heads": (3, "train with --kv-heads 3"),
    "rope_theta": (5e5, "rope_theta"),
    "rope_scaling": ({"type": "linear"}, "rope_scaling"),
    "rope_parameters": ({"rope_theta": 1e6}, "rope_theta"),
    "rms_norm_eps": (None, "rms_norm_eps in config.json is 1e-06"),
    "intermediate_size": (100, "train with --ffn 100"),
    "attention_bias": (True, "attention_bias"),
    "max_position_embeddings": (4, "train with --context 4"),
    "model_type": (["llama"], "it must be one of gpt2, llama"),
}


def test_a_model_that_computes_something_else_is_refused(written, tmp_path):
    model, folder, weights = written
    changes = GPT_CHANGES if model["model"] == "gpt" else LLAMA_CHANGES
    config = TrainConfig.make(**JOB, **model)
    content = json.loads((folder / CONFIG).read_text())
    save_file(weights, tmp_path / SINGLE)
    for key, (value, sentence) in changes.items():
        (tmp_path / CONFIG).write_text(json.dumps({**content, key: value}))
        with pytest.raises(UsageError, match=sentence):
            HuggingFaceFolder(str(tmp_path)).check(config)
    if model["model"] == "llama":  # a shorter context is the same model
        (tmp_path / CONFIG).write_text(json.dumps({**content, "max_position_embeddings": 4096}))
        HuggingFaceFolder(str(tmp_path)).check(config)


def test_files_that_do_not_fit_are_refused(written, tmp_path):
    model, folder, weights = written
    config = TrainConfig.make(**JOB, **model, init_from=str(tmp_path))
    (tmp_path / CONFIG).write_text((folder / CONFIG).read_text())
    table = next(name for name in weights if "wte" in name or "embed_tokens" in name)
    last = next(reversed(weights))
    cases = {
        "has no file 'model.safetensors'": None,
        f"has no tensor '{last}'": {name: value for name, value in weights.items() if name != last},
        "its vocabulary must be that of --data": {**weights, table: np.zeros((7, 24), np.float32)},
        "tensors that the model does not have, such as 'more'": {**weights, "more": np.zeros(3, np.float32)},
    }
    for sentence, tensors in cases.items():
        if tensors is not None:
            save_file(tensors, tmp_path / SINGLE)
        with pytest.raises(UsageError, match=sentence):
            loaded(config)
    whole = (folder / SINGLE).read_bytes()
    for damaged in (whole[:100], whole[:-9], b"\xff" * 64, b""):
        (tmp_path / SINGLE).write_bytes(damaged)
        with pytest.raises(UsageError, match="is damaged"):
            loaded(config)
    for index in ({}, {"weight_map": {"a": "../b"}}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}}):
        (tmp_path / INDEX).write_text(json.dumps(index))
        with pytest.raises(UsageError, match="--init-from"):
            loaded(config)


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(UsageError, match="add --save DIR"):
        check_saving_huggingface(TrainConfig.make(**JOB, model="gpt"), tmp_path / "new")
    job = TrainConfig.make(**JOB, model="gpt", experts=2, save="x")
    with pytest.raises(UsageError, match="without experts"):
        check_saving_huggingface(job, tmp_path / "new")
    (tmp_path / "a").write_text("mine")
    with pytest.raises(UsageError, match="is not an empty folder"):
        check_saving_huggingface(TrainConfig.make(**JOB, model="gpt", save="x"), tmp_path)


def test_the_command(tmp_path, minidist, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", "gpt", "--layers", "1", "--steps", "1", "--dp", "2"]
    for more in (["--save", "ck", "--save-hf", "hf"], ["--init-from", "hf"]):
        minidist(*words, *more)
    assert "--save-hf needs values" in minidist(*words, "--save", "ck2", "--save-hf", "hf2", "--dry-run", code=2).err


@pytest.mark.parametrize("shards", [[], ["--hf-shards", "3"]])
def test_a_folder_whose_writer_was_ended_is_finished_by_the_same_command_with_resume(
    shards, tmp_path, minidist, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", "gpt", "--layers", "1", "--width", "16", "--steps", "2", "--save", "ck", *shards]
    minidist(*words, "--save-hf", "whole")
    # The last file is missing, and one is half of a file; another one is of a run with other files.
    shutil.copytree("whole", "half")
    (tmp_path / "half" / CONFIG).unlink()
    first = min((tmp_path / "half").iterdir())
    first.write_bytes(first.read_bytes()[:100])
    (tmp_path / "half" / "model-00007-of-00009.safetensors").write_bytes(b"old")
    assert "written: half" in minidist(*words, "--save-hf", "half", "--resume").err
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == names
    for name in names:
        half, whole = tmp_path / "half" / name, tmp_path / "whole" / name
        if name.endswith(".json"):
            assert half.read_bytes() == whole.read_bytes()
        else:
            both = [{key: value.tobytes() for key, value in load_file(file).items()} for file in (half, whole)]
            assert both[0] == both[1]

    # A folder that is whole, or has a file of the user's, is not touched.
    assert "is not an empty folder" in minidist(*words, "--save-hf", "whole", "--resume", code=2).err
    (tmp_path / "half" / CONFIG).rename(tmp_path / "half" / "notes.txt")
    assert "is not an empty folder" in minidist(*words, "--save-hf", "half", "--resume", code=2).err


@pytest.mark.peers
def test_transformers_computes_the_same_logits(written):
    """The folder is read by its own library, whose logits are ours within float32."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, folder, _ = written
    config = TrainConfig.make(**JOB, **model, init_from=str(folder))
    ours = make_model(config, load_dataset(config.data))
    load_initial_weights(str(folder), config, ours)
    tokens = np.arange(16).reshape(2, 8) % load_dataset(config.data).vocab_size
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(folder))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(ours(tokens).data, expected, rtol=2e-5, atol=2e-6)

    # And back: a folder that save_pretrained has written.
    theirs.save_pretrained(str(folder.parent / "theirs"), safe_serialization=True)
    back = make_model(config, load_dataset(config.data))
    load_initial_weights(str(folder.parent / "theirs"), config, back)
    for mine, its in zip(ours.parameters(), back.parameters(), strict=True):
        assert np.array_equal(mine.data, its.data), mine.name


@pytest.mark.peers
def test_torchs_distributed_checkpoint_reads_and_writes_the_parts(written, tmp_path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model, folder, weights = written
    write_huggingface(Checkpoint(str(folder.parent / "ck")), tmp_path / "ours", shards=3)
    found = {name: torch.zeros(value.shape) for name, value in weights.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    for name, value in weights.items():
        assert np.array_equal(found[name].numpy(), value), name

    # And back, with the writer of torch.
    (tmp_path / "theirs").mkdir()
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True)
    dcp.save(found, storage_writer=writer, no_dist=True)
    (tmp_path / "theirs" / CONFIG).write_text((folder / CONFIG).read_text())
    for name, value in loaded(TrainConfig.make(**JOB, **model, init_from=str(tmp_path / "theirs"))).items():
        assert np.array_equal(value, weights[name]), name
