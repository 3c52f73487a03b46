"""fully_shard with a MixedPrecisionPolicy: the masters are the shards. The same bits as masters in the optimizer."""

import numpy as np
import pytest

from minidist.base.arrays import downcast, quiet_overflow
from minidist.base.half import named_dtype
from minidist.base.memory import account_memory
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor, contribution_recorder
from minidist.core.nn import MLP
from minidist.core.optim import AdamW
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters, shards_of
from minidist.optim import DynamicLossScaler, ParameterSlice
from minidist.parallel import CPUOffloadPolicy, HostPool, MixedPrecisionPolicy, gather_tensors, scaled_step
from minidist.parallel.shards import clip_shards_
from tests.cases import each
from tests.parallel.models import loss_of, small_gpt

ADAM = {"lr": 0.01, "weight_decay": 0.1}
FLOAT32 = np.dtype(np.float32)


def on_the_grid(dtype):
    """The model in float32, its values those of the model in half precision."""
    model = small_gpt()
    model.load_state_dict({p.name: p.data.astype(np.float32) for p in small_gpt(dtype=dtype).parameters()})
    return model


@quiet_overflow()
def train(comm, half, policy, local=1, steps=4, clip=0.3, pool=None):
    """Weights, gradients and state; half: of the policy, or of the stored parameters when there is none. pool: shards
    live there.
    """
    dtype = named_dtype(half)
    model = small_gpt(dtype=dtype) if policy is None else on_the_grid(dtype)
    for module in (*model.transformer.h, model):
        settings = {} if policy is None else {"mp_policy": policy}
        if pool is not None:
            settings["offload_policy"] = CPUOffloadPolicy(pool)
        fully_shard(module, mesh=comm, reduction="sum", algorithm="ordered", **settings)
    shards, scaler = shards_of(model), DynamicLossScaler(2.0**19, hysteresis=1)
    optimizer = AdamW(sharded_parameters(model), **ADAM)
    for step in range(steps):
        model.zero_grad()
        for i in range(local):
            scaler.scale_loss(loss_of(model, step, comm.rank * local + i, comm.size * local)).backward()
        clipping = lambda: clip_shards_(comm, shards, clip, optimizer)  # noqa: E731
        scaled_step(comm, scaler, optimizer, [shard.grad for shard in shards], clip=clipping)
    return gather_tensors(shards, optimizer), scaler.skipped


@each("half", ["float16", "bfloat16"], sampled=4)
@each("ranks", [1, 2, 3, 5])
def test_masters_as_shards_make_the_bits_of_masters_in_the_optimizer(ranks, half):
    dtype = named_dtype(half)
    for (tensors, skipped), (wanted, wanted_skipped) in zip(
        SimWorld(ranks).run(train, half, MixedPrecisionPolicy(param_dtype=dtype)),
        SimWorld(ranks).run(train, half, None),
        strict=True,
    ):
        assert skipped == wanted_skipped < 4
        for name, weight in tensors["weights"].items():
            assert np.array_equal(downcast(weight, dtype).view(np.uint16), wanted["weights"][name].view(np.uint16))
            assert np.array_equal(weight.reshape(-1), wanted["optimizer"][f"{name}.master"])
            assert np.array_equal(
                tensors["gradients"][name], wanted["gradients"][name].astype(np.float32), equal_nan=True
            )
        for name, state in tensors["optimizer"].items():
            assert np.array_equal(state, wanted["optimizer"][name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reduce", ["float16", "float32"])
@pytest.mark.parametrize("local", [1, 2])
def test_shards_on_the_host_have_the_same_bits_and_are_transferred_in_half_precision(local, reduce):
    policy = MixedPrecisionPolicy(np.dtype(np.float16), np.dtype(reduce))

    def on_host(comm):
        pool = HostPool(comm)
        result = train(comm, "float16", policy, local, pool=pool)
        return result, pool.to_device, pool.to_host

    right = SimWorld(2).run(train, "float16", policy, local)
    for ((tensors, skipped), up, down), (wanted, wanted_skipped) in zip(SimWorld(2).run(on_host), right, strict=True):
        assert skipped == wanted_skipped
        for kind, arrays in wanted.items():
            for name, array in arrays.items():
                assert np.array_equal(tensors[kind][name], array, equal_nan=True)
        # A shard goes up twice a micro-batch (forward, backward) in 2 bytes; its gradient down once, as it was reduced.
        assert down / up == np.dtype(reduce).itemsize / (2 * 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_reduced_in_float32_each_micro_batch_is_rounded_once_and_the_sums_are_not(ranks):
    """One device: contributions to a micro-batch in half precision; sums over ranks and micro-batches in float32."""
    dtype, local = np.dtype(np.float16), 2
    model = small_gpt(dtype=dtype)
    slices = [ParameterSlice(p.data.reshape(-1), None, p.name) for p in model.parameters()]
    optimizer = AdamW(slices, **ADAM)
    caught = []
    for number in range(ranks * local):
        parts = {}
        token = contribution_recorder.set(lambda p, a, parts=parts: parts.setdefault(p, []).append(a))
        loss_of(model, 0, number, ranks * local).backward()
        contribution_recorder.reset(token)
        caught.append({p: sum(sites[1:], sites[0]).astype(np.float32) for p, sites in parts.items()})
    for piece, p in zip(slices, model.parameters(), strict=True):
        total = None
        for i in range(local):
            of_micro_batch = sum((caught[rank * local + i][p] for rank in range(1, ranks)), caught[i][p])
            total = of_micro_batch if total is None else total + of_micro_batch
        piece.grad = total.reshape(-1)
    optimizer.step()

    def sharded(comm):
        model = on_the_grid(dtype)
        for module in (*model.transformer.h, model):
            fully_shard(
                module, mesh=comm, reduction="sum", algorithm="ordered", mp_policy=MixedPrecisionPolicy(dtype, FLOAT32)
            )
        stepper = AdamW(sharded_parameters(model), **ADAM)
        for i in range(local):
            loss_of(model, 0, comm.rank * local + i, ranks * local).backward()
        stepper.step()
        return gather_tensors(shards_of(model), stepper)

    for tensors in SimWorld(ranks).run(sharded):
        for piece in slices:
            assert np.array_equal(tensors["gradients"][piece.name].reshape(-1), piece.grad), piece.name
            assert np.array_equal(tensors["weights"][piece.name].reshape(-1), optimizer.state[piece.name]["master"])


@pytest.mark.parametrize("reduce_dtype", [None, FLOAT32])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_sent_and_held(ranks, reduce_dtype):
    policy = MixedPrecisionPolicy(np.dtype(np.float16), reduce_dtype)

    def main(comm):
        with account_memory() as account:
            model = small_gpt()
            for module in (*model.transformer.h, model):
                fully_shard(module, mesh=comm, reduction="sum", mp_policy=policy, prefetch=0)
            optimizer = AdamW(sharded_parameters(model))
            loss_of(model, 0, comm.rank, comm.size).backward()
            optimizer.step()
            shards = shards_of(model)
            return dict(account.by_purpose), dict(account.peak_by_purpose), shards, model

    world = SimWorld(ranks)
    for (held, peak, shards, _), trace in zip(world.run(main), world.traces, strict=True):
        psi = sum(shard.flat.padded_numel for shard in shards)
        sent = trace.bytes_by_purpose()
        assert sent["parameter_gather"] == 2 * 2 * psi * (ranks - 1) // ranks
        assert sent["gradient_reduce"] == (2 if reduce_dtype is None else 4) * psi * (ranks - 1) // ranks
        assert held["parameter"] == held["gradient"] == 4 * psi // ranks
        assert held.get("optimizer", 0) == 8 * sum(
            piece.stop - piece.start for shard in shards for piece in shard.slices()
        )
        # The rest of the model (embeddings) stays whole from its forward on while a block is gathered: the two largest.
        assert peak["unsharded"] <= 2 * sum(sorted(shard.flat.padded_numel for shard in shards)[-2:])


def test_inputs_and_outputs_are_cast():
    def main(comm, cast):
        model = MLP([4, 8, 3])
        policy = MixedPrecisionPolicy(np.dtype(np.float16), output_dtype=FLOAT32, cast_forward_inputs=cast)
        fully_shard(model.layers[0], mesh=comm, mp_policy=MixedPrecisionPolicy(np.dtype(np.float16)))
        fully_shard(model, mesh=comm, mp_policy=policy)
        x = Tensor(np.ones((2, 4), np.float32), requires_grad=True)
        inside = []
        model.layers[1].activation = None
        original = model.layers[1].forward
        vars(model.layers[1])["forward"] = lambda value: inside.append(value.dtype) or original(value)
        result = model(x)
        result.sum().backward()
        return result.dtype, inside[0], x.grad.dtype

    for outer, hidden, gradient in SimWorld(2).run(main, True):
        assert (outer, hidden, gradient) == (FLOAT32, np.dtype(np.float16), FLOAT32)
