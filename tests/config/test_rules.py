"""Settings that do not combine are one sentence with the numbers and the nearest settings that do."""

import re

import pytest

from minidist.base.errors import UsageError
from minidist.comm.launch import execute, writable
from minidist.commands.runner import number_of_ranks
from minidist.config.train_config import TrainConfig, resolve_dims
from minidist.equality.compare import tier_of
from minidist.report.frame import new_figure, save
from minidist.report.page import write_page
from minidist.report.perfetto import write_perfetto


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tp": 3}, "--heads 4 does not divide over --tp 3; take a --width that is a multiple of 3, or --tp 1, 2, 4"),
        ({"tp": 3, "width": 48}, "--heads 4 does not divide over --tp 3; take --heads 3 or 6, or --tp 1, 2, 4"),
        ({"tp": 3, "model": "mlp"}, "--width 64 does not divide over --tp 3; take --width 63 or 66, or --tp 1, 2, 4"),
        (
            {"tp": 2, "model": "llama", "heads": 6, "kv_heads": 3, "width": 48},
            "--kv-heads 3 does not divide over --tp 2",
        ),
        (
            {"sequence_parallel": True},
            "--sequence-parallel splits the sequence over the tensor-parallel ranks; add --tp 2",
        ),
        (
            {"tp": 2, "sequence_parallel": True, "context": 7},
            "--context 7 does not divide into 2 parts for --sequence-parallel; take --context 4 or 8",
        ),
        ({"tp": 2, "sequence_parallel": True, "model": "mlp"}, "which an MLP does not have"),
        ({"cp": 65}, "--cp 65 leaves ranks without any of the --context 64 tokens; take at most 64"),
        ({"cp": 2, "model": "mlp"}, "--cp 2 splits sequences, which an MLP does not have; take --dp 2"),
        (
            {"cp": 3, "attention": "ulysses"},
            (
                "deals the 4 .* heads of a rank to --cp 3 ranks, which does not divide; take --cp 1, 2, 4, or"
                " --attention ring"
            ),
        ),
        ({"experts": 4, "ep": 3, "dp": 3}, "--experts 4 do not divide over --ep 3; take --experts 3 or 6"),
        ({"ep": 2, "dp": 2}, "--experts 0 do not divide over --ep 2; take --experts 2"),
        ({"ep": 2, "experts": 4}, "--ep 2 does not divide --dp 1"),
        ({"experts": 1, "top_k": 2}, "--top-k 2 of --experts 1: a token cannot visit more experts than there are"),
        ({"experts": 4, "model": "llama"}, "--experts belongs to --model gpt, not to llama"),
        (
            {"pp": 2, "schedule": "pipedream-2bw", "model": "llama", "evaluate_every": 1},
            "--evaluate-every needs a moment at which no micro-batch is under way",
        ),
        ({"strategy": "ps", "evaluate_every": 1}, "--evaluate-every belongs to ranks that step together"),
        (
            {"tp": 2, "recompute": "budget:40000"},
            (
                "--recompute budget:40000 runs a block once to see what it keeps, and with --tp, --cp or --ep a block"
                " sends messages"
            ),
        ),
        (
            {"experts": 4, "ep": 2, "dp": 2, "zero": 3},
            "--zero 3 gathers a block over one group of ranks, and with --ep 2 its experts have another",
        ),
        (
            {"model": "llama", "heads": 4, "kv_heads": 3},
            "--heads 4 do not share --kv-heads 3 evenly; take one of 1, 2, 4",
        ),
        ({"model": "gpt", "kv_heads": 2}, "--kv-heads belongs to --model llama"),
        (
            {"model": "mlp", "recompute": "budget:5000"},
            "--recompute budget:5000 measures one block .* use --recompute sqrt or full",
        ),
        ({"zero": 3, "reshard_after_forward": "²"}, "--reshard-after-forward '²'; it must be true, false or a number"),
        ({"recompute": "budget:²"}, "must be one of none, full, selective, sqrt, budget:BYTES"),
        (
            {"save": "/dev/null/checkpoints"},
            "checkpoints cannot be written to --save /dev/null/checkpoints: .*; choose another directory",
        ),
        ({"model": "llama", "dropout": 0.1}, "--dropout 0.1 belongs to --model gpt"),
        ({"model": "llama", "width": 12}, "--width 12 is not a multiple of 2 x --heads 4; try --heads 3 or --heads 6"),
        (
            {"pp": 2, "zero": 3, "schedule": "zb-v", "layers": 4},
            "--zero 3 sends a unit's gradient when backward leaves the unit, and --schedule zb-v",
        ),
        ({"dp": 2, "prefetch": 2}, "--prefetch 2 has no effect here; it belongs to --zero 3"),
        ({"zero": 1, "bucket_cap_mb": 1.0}, "--bucket-cap-mb 1.0 has no effect here; it belongs to --zero 0"),
        ({"top_k": 2}, "--top-k 2 has no effect here; it belongs to --experts"),
        ({"loss_scale": 8.0}, "--loss-scale 8.0 has no effect here; it belongs to --precision fp16"),
        ({"schedule": "gpipe"}, "--schedule gpipe has no effect here; it belongs to --pp 2 or more"),
        (
            {"pp": 2, "schedule": "pipedream", "model": "llama", "save": "x"},
            "--save needs a moment at which no micro-batch is under way",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(values, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        number_of_ranks(TrainConfig.make(**values), None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"tp": 3, "width": 48},
        {"tp": 3, "model": "mlp"},
        {"cp": 3, "attention": "ulysses"},
        {"model": "llama", "width": 12},
    ],
)
def test_what_a_sentence_proposes_works(values):
    with pytest.raises(UsageError) as caught:
        number_of_ranks(TrainConfig.make(**values), None)
    name, numbers = re.findall(r"(?:take|try) --(\S+) (\d+)", str(caught.value))[-1]
    fixed = {**values, name: int(numbers)}
    number_of_ranks(TrainConfig.make(**fixed), None)


def test_the_tier_follows_from_what_is_cut():
    def tier(**values):
        config = TrainConfig.make(**{"reduction": "ordered", **values})
        return tier_of(config, resolve_dims(config))

    assert tier(dp=2, pp=2, zero=3) == "ordered"
    for axis in ({"tp": 2}, {"cp": 2}, {"dp": 2, "ep": 2, "experts": 2}):
        assert tier(**axis, precision="fp64", steps=5) == "float"
        with pytest.raises(UsageError, match=r"cuts the sums inside a micro-batch.*--precision fp64"):
            tier(**axis)
        with pytest.raises(UsageError, match="at most 5 steps"):
            tier(**axis, precision="fp64", steps=6)
    for wild in ({"optimizer": "adagrad"}, {"optimizer": "rmsprop"}, {"optimizer": "adam", "weight_decay": 0.1}):
        with pytest.raises(UsageError, match=r"attention's key bias.*take one of them"):
            tier(tp=2, precision="fp64", steps=5, **wild)
        assert tier(dp=2, **wild) == "ordered"


@pytest.mark.parametrize("name", ["capacity_factor", "lr", "aux_loss_weight", "weight_decay", "loss_scale"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_setting_is_a_finite_number(name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} (inf|nan): input should be"):
        TrainConfig.make(**{name: value})


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_timeout_is_a_number_of_seconds_that_a_thread_can_wait(seconds):
    with pytest.raises(UsageError, match=r"--timeout \S+; it must be at least 0 seconds"):
        execute(lambda comm: None, ranks=1, timeout=seconds)


@pytest.mark.parametrize("suffix", [".svg", ".html", ".json"])
def test_a_picture_that_cannot_be_written_is_one_sentence(suffix):
    figure, path = new_figure(1, 1), f"/dev/null/x{suffix}"
    write = {
        ".svg": lambda: save(figure, path),
        ".html": lambda: write_page(path, [], {}),
        ".json": lambda: write_perfetto(path, []),
    }[suffix]
    with pytest.raises(UsageError, match=r"the output cannot be written to /dev/null/x.*; choose another --output"):
        write()


def test_a_file_that_cannot_be_written_is_named_with_its_flag():
    with pytest.raises(UsageError, match=r"the metrics cannot be written to /dev/null/x: .*; choose another --metrics"):
        writable("/dev/null/x", "--metrics")
