"""Generation: the same text from the same seed, whoever trained the model; what temperature and top-k mean."""

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.base.flop_counter import FlopCounter
from minidist.comm import SimWorld
from minidist.commands.generation import Vocabulary, as_text, as_tokens, choose, generate, load_model, run_generation
from minidist.core.base.errors import UsageError
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.metrics import read_metrics
from minidist.job.train.trainer import train
from minidist.nn.kv_cache import KeyValueCache
from tests.cases import each
from tests.jobs import SMALL_GPT

GPT = SMALL_GPT | {"context": 8, "data": "pydoc", "global_batch": 8, "dropout": 0.2, "steps": 2}


def trained(folder, ranks=1, **values):
    """Train and save; the weights that the ranks have in the end, whole."""
    config = TrainConfig.make(**{**GPT, "save": str(folder), **values})
    weights = {}
    SimWorld(ranks).run(train, config, [lambda state: weights.update(state.strategy.tensors()["weights"])])
    return weights


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    trained(folder, accumulation=4)
    return folder


LAYOUTS = [
    {"dp": 4, "zero": 0},
    {"dp": 3, "zero": 2, "global_batch": 9},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2, "microbatches": 4},
    {"dp": 2, "pp": 2, "tp": 2, "zero": 1, "microbatches": 4},
]


@each("layout", LAYOUTS, ids=str)
def test_the_model_is_the_one_that_was_trained_in_any_layout(tmp_path, layout):
    weights = trained(tmp_path, prod(layout.get(axis, 1) for axis in ("dp", "pp", "tp")), **layout)
    model, _ = load_model(tmp_path)
    assert {p.name for p in model.parameters()} == set(weights)
    for parameter in model.parameters():
        assert np.array_equal(parameter.data, weights[parameter.name]), parameter.name
    assert len(run_generation(tmp_path, "The ", 5, 0.8, 40, 3)["tokens"]) == 5


def test_a_seed_fixes_the_text_and_another_one_changes_it(alone):
    texts = [run_generation(alone, "The ", 40, 1.0, None, seed)["tokens"] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 40
    assert run_generation(alone, "The ", 12, 1.0, None, 0)["tokens"] == texts[0][:12]


@each(
    "settings",
    [
        {"model": "gpt", "context": 24},
        {"model": "llama", "context": 24, "heads": 4, "kv_heads": 2, "precision": "fp64"},
        {"model": "llama", "context": 24, "width": 24, "heads": 2, "kv_heads": 1},
        {"model": "gpt", "context": 24, "experts": 2},
    ],
    ids=["gpt", "llama", "llama, one key-value head", "experts"],
)
@each("temperature", [0.0, 1.0])
def test_the_text_is_the_same_with_and_without_a_cache_and_a_token_costs_one_tokens_work(settings, temperature):
    """Also where the window slides: then it is computed anew."""
    config = TrainConfig.make(**{**GPT, "dropout": 0.0, **settings})
    model = make_model(config, Vocabulary(256)).eval()
    prompt, work, texts = np.frombuffer(b"To be, or", np.uint8), {}, {}
    for cached in (True, False):
        with FlopCounter() as counter:
            steps = generate(model, prompt, 20, 24, temperature, None, 5, kv_cache=cached)
            pairs = [(token, sum(flops for flops, _ in counter.take())) for token in steps]
        texts[cached], work[cached] = zip(*pairs, strict=True)
    assert texts[True] == texts[False]
    assert work[True][0] == work[False][0]  # the prompt
    assert work[True][16:] == work[False][16:]  # 9 + 16 tokens are more than the context
    if config.experts:
        assert work[True] == work[False]
        with pytest.raises(UsageError, match=r"GPT has no cache of keys and values: .* generate without a cache"):
            KeyValueCache(model, 24)
        return
    # Products of one token with all weights, and of its query with the keys and values so far: 2 P + 4 L t D.
    products = sum(p.size for p in model.parameters() if p.ndim == 2) - 256 * config.width * (config.model == "llama")
    products -= 24 * config.width * (config.model == "gpt")
    for number, flops in enumerate(work[True][1:16]):
        exact = 2 * products + 4 * config.layers * (10 + number) * config.width
        assert exact <= flops <= 1.3 * exact  # norms and activations are the rest
        assert 7 < work[False][number + 1] / flops < 10 + number + 1


def test_a_cache_holds_the_bytes_of_its_formula_and_grows_by_pieces():
    config = TrainConfig.make(**{**GPT, "model": "llama", "heads": 4, "kv_heads": 2, "precision": "fp64"})
    model, text = make_model(config, Vocabulary(256)).eval(), list(b"abcdefgh")
    whole, pieces = KeyValueCache(model, 8), KeyValueCache(model, 8)
    assert pieces.nbytes == 0
    expected = whole.extend(text)
    for piece in (text[:1], text[1:4], text[4:]):
        logits = pieces.extend(piece)
    assert np.abs(logits - expected).max() < 1e-12
    layers, tokens, kv_heads, head_size, itemsize = 2, 8, 2, 4, 8
    assert pieces.nbytes == whole.nbytes == 2 * layers * tokens * kv_heads * head_size * itemsize
    assert np.array_equal(model(np.array([text])).data[0, -1], expected)  # the model is as it was
    for wrong, sentence in (([1], "1 new tokens for a cache with 8 of 8 tokens"), ([], "0 new tokens")):
        with pytest.raises(UsageError, match=sentence):
            whole.extend(wrong)


def test_temperature_0_takes_what_one_forward_pass_says(alone):
    """Also beyond the context: the window slides. And dropout is off."""
    model, config = load_model(alone)
    text = list(b"abc")
    for token in generate(model, np.frombuffer(b"abc", np.uint8), 12, config.context, temperature=0):
        logits = model(np.array([text[-8:]])).data[0, -1]
        assert token == int(np.argmax(logits))
        text.append(token)


@settings(max_examples=15)
@given(st.integers(2, 12), st.integers(1, 12), st.floats(0.1, 5), st.integers(0, 1000))
def test_draws_follow_the_distribution(size, k, temperature, seed):
    logits = np.random.default_rng(seed).standard_normal(size)
    kept = np.argsort(-logits, kind="stable")[:k]
    weights = np.zeros(size)
    weights[kept] = np.exp(logits[kept] / temperature)
    expected = weights / weights.sum()
    draws = (np.arange(500) + 0.5) / 500
    counts = np.bincount([choose(logits, temperature, k, draw) for draw in draws], minlength=size) / 500
    assert np.abs(counts - expected).max() <= 1 / 500 + 1e-9
    assert choose(logits, temperature, 1, draws[seed % 500]) == int(np.argmax(logits))


def test_llama_and_numbers_as_tokens(tmp_path):
    trained(tmp_path, model="llama", data="markov", dropout=0.0)
    answer = run_generation(tmp_path, "3 1 2", 5, 1.0, None, 0)
    assert len(answer["tokens"]) == 5
    assert answer["text"] == " ".join(map(str, answer["tokens"]))
    with pytest.raises(UsageError, match="numbers from 0 to 15"):
        run_generation(tmp_path, "3 99", 5, 1.0, None, 0)
    with pytest.raises(UsageError, match="write them with spaces"):
        run_generation(tmp_path, "three", 5, 1.0, None, 0)


def test_bytes_become_text():
    assert as_text([226, 130, 172, 255], 256) == "€\ufffd"
    assert as_tokens("€", 256).tolist() == [226, 130, 172]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "at least 0"),
        ({"top_k": 0}, "at least 1"),
        ({"prompt": ""}, "at least one token"),
        ({"count": -1}, "at least 0"),
    ],
)
def test_wrong_settings(alone, values, words):
    asked = {"prompt": "a", "count": 1, "temperature": 1.0, "top_k": None, "seed": 0, **values}
    with pytest.raises(UsageError, match=words):
        run_generation(alone, **asked)


def test_a_classifier_is_refused(tmp_path):
    trained(tmp_path, model="mlp", data="glyphs", dropout=0.0)
    with pytest.raises(UsageError, match="holds a classifier"):
        load_model(tmp_path)
    with pytest.raises(UsageError, match="no checkpoint"):
        load_model(tmp_path / "nowhere")


def test_the_command_and_the_metrics_file(tmp_path, minidist):
    job = ["--steps", "3", "--dp", "2", "--width", "16", "--heads", "2", "--context", "8", "--warmup", "2"]
    job += ["--save", str(tmp_path / "c")]
    lines = tmp_path / "m" / "metrics.jsonl"
    summary = json.loads(minidist("train", *job, "--metrics", lines, "--trace", tmp_path / "t.jsonl", "--json").out)
    records = read_metrics(lines)
    assert [r["loss"] for r in records] == summary["losses"]
    assert [r["step"] for r in records] == [0, 1, 2]
    assert [r["samples"] for r in records] == [8, 16, 24]
    assert records[0]["lr"] < records[-1]["lr"]
    assert records[0]["bytes_sent"] < records[-1]["bytes_sent"]
    assert len(json.loads(minidist("generate", tmp_path / "c", "--tokens", "4", "--json").out)["tokens"]) == 4


def test_the_folder_of_one_checkpoint_is_accepted(tmp_path, minidist):
    """As --init-from accepts it: the model of that step, and not the latest one."""
    trained(tmp_path, every=1, keep=3, steps=3)
    first, last = sorted(path for path in tmp_path.iterdir() if path.is_dir())[::2]
    for folder, step in ((first, 1), (last, 3)):
        texts = []
        for words in ([str(folder)], [str(tmp_path), "--from-step", str(step)]):
            texts.append(minidist("generate", *words, "--tokens", "9").out)
        assert texts[0] == texts[1]
        same = zip(load_model(folder)[0].parameters(), load_model(tmp_path, step)[0].parameters(), strict=True)
        for one, other in same:
            np.testing.assert_array_equal(one.data, other.data, strict=True)
    earliest, latest = (np.asarray(next(iter(load_model(folder)[0].parameters())).data) for folder in (first, last))
    assert not np.array_equal(earliest, latest)
    with pytest.raises(UsageError, match="is the checkpoint of one step; leave --from-step 3 out, or name "):
        load_model(first, 3)


def test_callbacks_see_every_step_on_every_rank(tmp_path):
    from minidist.commands.runner import run_training

    seen = []
    keep = [lambda state: seen.append((state.rank, state.step, state.loss))]
    run_training(TrainConfig.make(**GPT), 2, 60.0, tmp_path / "t.jsonl", callbacks=keep)
    assert sorted(step[:2] for step in seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({loss for _, step, loss in seen if step == 1}) == 1


def test_numbers_are_printed_with_spaces_between_them(tmp_path, minidist):
    trained(tmp_path, model="llama", data="random:300", dropout=0.0)
    printed = minidist("generate", tmp_path, "--prompt", "1 2 3", "--tokens", "4").out.split()
    assert printed[:3] == ["1", "2", "3"]
    assert len(printed) == 7
    assert all(0 <= int(word) < 300 for word in printed)
