"""How many GPUs: days, GPU hours and costs with their ranges, what surely fits, and what host memory is worth."""

import json
import re
from dataclasses import replace

import pytest

from minidist.planning.architecture import Architecture, named
from minidist.planning.cluster import host
from minidist.planning.cluster.calibration import CALIBRATION
from minidist.planning.cluster.decision import Offer, answer, offers, overlap, ranges, smallest
from minidist.planning.cluster.gpus import MACHINES
from minidist.planning.cluster.layout import ClusterLayout, Job
from minidist.planning.cluster.memory import block_activations, memory_by_rank
from minidist.planning.cluster.search import Plan, remedies, search
from minidist.planning.config_keys import Keys
from minidist.planning.decoder import architecture_of

H100, V100, CARD = MACHINES["h100"], MACHINES["v100"], MACHINES["rtx-4090"]
LARGE = Job(named("llama-3.1-70b"), 8192, 512, "bf16", 64)
GPT = Architecture(8, 512, 8, 1024, 256, 2048)


def test_a_run_takes_days_gpu_hours_and_money():
    """tokens / (tokens per second) seconds; every number with the range of a step's seconds."""
    plan = search(LARGE, H100, {"zero": 1, "cp": 1}).plans[0]
    found = ranges(plan, 2e12, 2.5)
    seconds = 2e12 / plan.tokens_per_second
    short, long = plan.time_range
    assert found["days"] == tuple(pytest.approx(factor * seconds / 86_400) for factor in (short, 1, long))
    assert found["gpu_hours"] == tuple(pytest.approx(factor * seconds / 3600 * 64) for factor in (short, 1, long))
    assert found["cost"] == tuple(pytest.approx(2.5 * hours) for hours in found["gpu_hours"])
    assert list(ranges(plan, None, None)) == ["tokens_per_second"]
    assert list(ranges(plan, 2e12, None)) == ["tokens_per_second", "days", "gpu_hours"]


def test_each_number_of_gpus_offers_the_best_of_its_own_search():
    fixed = {"cp": 1, "vp": 1}
    found = offers(LARGE, H100, fixed, (64, 7, 128, 16), 2e12)
    assert [offer.gpus for offer in found] == [7, 16, 64, 128]
    for offer in found:
        plans = search(replace(LARGE, gpus=offer.gpus), H100, fixed).plans
        assert offer.plan == (plans[0] if plans else None), offer.gpus
    assert smallest(found) == next(offer for offer in found if offer.verdict == "yes")
    assert found[0].verdict == "no"
    assert found[0].reason == "pipeline rank 0 keeps 136 GB on the host, which has 125 GB for each GPU"


def offer_of(gpus, speed, verdict="yes"):
    """Return an offer with a speed, whose range is that of the calibration."""
    short, long = CALIBRATION.time_range
    of_peak = {"yes": 0.5, "may not": 0.97, "no": 2}[verdict] * H100.memory

    class Made(Plan):
        @property
        def fit(self):
            return type(super().fit).of_peak(H100, of_peak)

        @property
        def tokens_per_second(self):
            return speed

    plan = Made(ClusterLayout(gpus), replace(LARGE, gpus=gpus), H100)
    return Offer(gpus, plan, {"tokens_per_second": (speed / long, speed, speed / short)})


def test_the_sentence_names_the_smallest_number_and_compares_costs():
    """Costs whose ranges overlap are equal within the error; what is farther away is a ratio."""
    text = answer([offer_of(32, 1e4, "may not"), offer_of(64, 2e4), offer_of(128, 3.9e4)], LARGE, H100, {})
    assert text == (
        "64 is the smallest of these numbers of GPUs on which a layout surely fits; a run costs the same within the"
        " error on 64, 128, and takes 0.51 times as long on 128 as on 64"
    )
    text = answer([offer_of(64, 1e4), offer_of(128, 4e4)], LARGE, H100, {})
    assert text.endswith("fits; it costs 2.00 times on 64 what it costs on 128")
    text = answer([offer_of(32, 1e4, "may not")], LARGE, H100, {})
    assert text == "none of these numbers of GPUs surely fits; 32 may, if memory is at the low end"
    assert overlap((1, 2, 3), (3, 4, 5))
    assert not overlap((1, 2, 2.9), (3, 4, 5))


def test_the_command_prints_one_table_for_several_numbers(minidist):
    job = ["plan", "--model", "llama-3.1-70b", "--seq", "8192", "--global-batch", "512", "--cp", "1", "--vp", "1"]
    job += ["--ranks", "4,64,128"]
    text = minidist(*job, "--tokens", "2e12", "--price", "2.5").out
    rows = [line.split()[:2] for line in text.splitlines() if re.match(r" +\d+  (yes|may|no)", line)]
    assert rows == [["4", "no"], ["64", "yes"], ["128", "yes"]]
    assert re.search(r"days +GPU hours +cost", text)
    assert "64 is the smallest of these numbers of GPUs on which a layout surely fits" in text
    assert "dry run of the layout on 64:" in text
    result = json.loads(minidist(*job, "--tokens", "2e12", "--price", "2.5", "--json").out)
    assert result["smallest_that_fits"] == 64
    first, middle, last = result["counts"]
    assert (first["fits"], first["layout"]) == (False, None)
    assert middle["cost"]["low"] < middle["cost"]["central"] < middle["cost"]["high"]
    assert last["days"]["central"] == pytest.approx(2e12 / last["layout"]["tokens_per_second"] / 86_400)
    assert result["answer"] in text
    # None of them fits.
    large = ["plan", "--model", "gpt3-175b", "--seq", "2048", "--global-batch", "64", "--ranks", "1,2"]
    assert "no layout of these numbers of GPUs fits" in minidist(*large, code=1).out
    # One number has the same figures in its own report.
    alone = json.loads(minidist(*job[:-1], "64", "--tokens", "2e12", "--json").out)
    assert alone["days"] == middle["days"]
    assert "the whole run with the first: " in minidist(*job[:-1], "64", "--tokens", "2e12").out


def test_wrong_numbers_are_one_sentence(minidist):
    job = ["--model", "gpt2", "--seq", "1024", "--global-batch", "64"]
    for more, sentence in (
        (["--ranks", "8,x"], "--ranks '8,x'; it must be whole numbers with commas"),
        (["--ranks", "8,0"], "--ranks is 0; it must be from 1"),
        (["--ranks", "8", "--price", "2"], "--price 2 is of a GPU hour, and their number is unknown; add --tokens"),
        (["--ranks", "8,16", "--explain"], "--explain is about one number of GPUs"),
        (["--ranks", "8", "--offload", "disk"], "--offload 'disk'; it must be none, optimizer, activations or par"),
    ):
        assert sentence in minidist("plan", *job, *more, code=2).err


# host memory ----------------------------------------------------------------------------------------------------------


def test_what_is_on_the_host_is_not_on_the_gpu():
    """Each choice moves its kinds, and nothing is lost."""
    layout = ClusterLayout(4, zero=3, micro_batch=8)
    job = Job(GPT, 256, 32, "bf16", 4)
    whole = memory_by_rank(layout, job)[0]
    block = block_activations(layout, job, 0)
    for choice, moved in (
        ("optimizer", whole.by_kind["optimizer"]),
        ("parameters", whole.states),
        ("activations", whole.by_kind["activations"] - 2 * block),
    ):
        rank = memory_by_rank(replace(layout, host=choice), job)[0]
        assert rank.host == moved > 0, choice
        assert rank.peak == whole.peak - moved, choice


def test_a_gpu_waits_for_what_computing_does_not_hide():
    """The update on the host is never hidden, transfers are as long as the GPU computes."""
    layout, job = ClusterLayout(2, zero=3, microbatches=3), Job(GPT, 256, 6, "bf16", 2)
    p, kept = 1e9, 5e9
    update = host.UPDATE_BYTES * p / host.BANDWIDTH
    transfers = {"optimizer": 4 * p, "activations": 2 * 3 * kept, "parameters": 3 * 8 * p}
    after = {"optimizer": update + 2 * p / host.LINK, "activations": 0.0, "parameters": update}
    for choice in ("optimizer", "activations", "parameters"):
        of = replace(layout, host=choice)
        assert host.waiting_seconds(of, job, p, kept, 1e6) == pytest.approx(after[choice]), choice
        alone = host.waiting_seconds(of, job, p, kept, 0.0)
        assert alone == pytest.approx(transfers[choice] / host.LINK + after[choice]), choice
    assert host.waiting_seconds(layout, job, p, kept, 0.0) == 0.0


def test_host_memory_is_searched_when_nothing_fits():
    """And only then; the share of the step for which GPUs wait is in the step's seconds."""
    job = Job(named("llama-3.1-8b"), 4096, 64, "fp16", 2)
    found = search(job, V100, {})
    assert {plan.layout.host for plan in found.plans} <= {"optimizer", "activations", "parameters"}
    assert all(rank.host <= V100.host_memory for plan in found.plans for rank in plan.memory)
    first = found.plans[0]
    assert 0 < first.waiting == first.time.exposed["host"] / first.time.seconds < 1
    gpu = Plan(replace(first.layout, host="none"), job, V100)
    assert first.time.seconds > gpu.time.seconds - 1.0
    assert {plan.layout.host for plan in search(replace(job, gpus=16), V100, {}).plans} == {"none"}
    assert search(job, V100, {"host": "none"}).plans == []
    # One GPU can have shards on the host, too, and its remedy is a number of GPUs whose hosts have enough.
    one = search(Job(named("llama-7b"), 4096, 8, "bf16", 1), CARD, {})
    assert {(plan.layout.zero, plan.layout.host) for plan in one.plans} == {(3, "parameters")}
    eight = replace(one.plans[0].job, model=named("llama-3.1-8b"))
    assert search(eight, CARD, {}).too_large[0].layout.host == "parameters"
    assert remedies(eight, CARD, {})[0] == "--ranks 2"
    assert remedies(eight, CARD, {"host": "none"})[0] == "--ranks 8"
    # The rank with the most bytes on the host counts, which is not the fullest one on the GPU.
    sizes = {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16}
    sizes |= {"intermediate_size": 4096, "n_routed_experts": 340, "first_k_dense_replace": 3, "vocab_size": 1000}
    sparse = Job(architecture_of(Keys(sizes, "f", "deepseek_v3")), 4096, 32, "bf16", 4)
    layout = ClusterLayout(1, pp=4, zero=3, micro_batch=8, microbatches=4, host="parameters")
    uneven = Plan(layout, sparse, MACHINES["h200"])
    assert uneven.fullest.host < CARD.host_memory < max(rank.host for rank in uneven.memory)
    assert not uneven.fits
    assert uneven.shortage == "pipeline rank 3 keeps 138 GB on the host, which has 125 GB for each GPU"
    roomy = replace(MACHINES["h200"], host_memory=140e9)
    assert Plan(layout, sparse, roomy).fits
    assert Plan(layout, sparse, replace(roomy, host_memory=130e9)).shortage.endswith("which has 130 GB for each GPU")
    # More than the host has is no layout that fits.
    alone = Job(named("gpt3-175b"), 2048, 8, "bf16", 8)
    assert search(alone, H100, {}).plans == []


def test_what_host_memory_costs_is_printed(minidist):
    small = ["plan", "--model", "llama-3.1-8b", "--seq", "4096", "--gpu", "v100", "--precision", "fp16", "--ranks", "2"]
    text = minidist(*small, "--global-batch", "64").out
    assert "with a part of the memory on the host" in text.splitlines()[0]
    assert re.search(r"waiting for the host \([\d.]+% of the step\)", text)
    assert re.search(r"--offload (optimizer|parameters|activations)", text)
    # A layout that is wholly given stays what it is; the remedy is named.
    given = ["--dp", "2", "--tp", "1", "--pp", "1", "--cp", "1", "--zero", "3", "--micro-batch", "1", "--recompute"]
    text = minidist(*small, *given, "full", "--global-batch", "64", code=1).out
    assert "something fits with --offload parameters, or --gpu" in text.splitlines()[-1]
    minidist(*small, *given, "full", "--global-batch", "64", "--offload", "parameters")
