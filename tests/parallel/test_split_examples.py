"""The examples of split layers, in both worlds."""

import re

import pytest

from tests.examples import in_both_worlds


def losses(output):
    return [float(value) for value in re.findall(r"loss ([\d.]+)", output)]


@in_both_worlds(2)
@pytest.mark.parametrize("flags", [(), ("--sequence-parallel",)])
def test_tensor_parallel_gpt(world, flags, example):
    output = example(world, 2, "tensor_parallel_gpt", *flags)
    assert len(losses(output)) == 10
    assert losses(output)[-1] < losses(output)[0] - 1
    assert "rank 0 holds 60,736 of 118,528 parameters" in output
    assert ("regather" in output) == bool(flags)


@in_both_worlds(2)
@pytest.mark.parametrize(("flags", "forward"), [((), 2 * 32 * 32), (("--ulysses",), (2 * 64 + 2 * 32) * 64 // 2 // 2)])
def test_context_parallel_llama(world, flags, forward, example):
    output = example(world, 2, "context_parallel_llama", *flags)
    assert len(losses(output)) == 10
    assert losses(output)[-1] < losses(output)[0] - 1
    # 10 steps, 2 layers, 4 rows, 4 bytes; K and V have half the heads
    assert f"rank 0 sent {10 * 2 * 4 * 4 * forward:,} bytes in forward" in output, output


@in_both_worlds(2)
@pytest.mark.parametrize(("flags", "top_k"), [((), 1), (("--top-2",), 2)])
def test_expert_parallel_gpt(world, flags, top_k, example):
    output = example(world, 2, "expert_parallel_gpt", *flags)
    assert len(losses(output)) == 10
    assert losses(output)[-1] < losses(output)[0] - 1
    # 10 steps, 2 layers, 4 all-to-alls of half of top_k 1.25 x 128 tokens, 64 wide, 4 bytes
    assert f"sent {10 * 2 * 4 * top_k * 160 * 64 * 4 // 2:,} bytes of tokens" in output, output
