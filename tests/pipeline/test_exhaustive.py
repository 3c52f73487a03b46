"""All cases, where the other tests run a sample: `make exhaustive`."""

import itertools

import pytest

from tests.pipeline.cases import plan_of
from tests.pipeline.test_plans import check_closed_forms, check_versions, takes
from tests.pipeline.test_runtime import RANKS, SYNCHRONOUS, V_SHAPED, empty_stages, equal_gpt, equal_mlp

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *V_SHAPED])
def test_every_schedule_size_optimizer_and_model(name, p):
    """The last micro-batch is always smaller: MLP in the exact tier; GPT with tied embeddings, also with stages without
    blocks and without parameters, in the ordered tier over two steps. Every gradient, weight and state, bit for bit.
    """
    sizes = [m for m in range(1, 10) if takes(name, p, m)] or [
        m for m in (2 * p, 2 * p + 2) if takes(name, p, m)
    ]  # DualPipe wants 2p
    if not sizes:
        pytest.skip(f"{name} is not made for {p} ranks")
    for m, optimizer in itertools.product(sizes, ("sgd", "adam")):
        plan = plan_of(name, p, m)
        equal_mlp(plan, optimizer)
        equal_gpt(plan, optimizer)
        if plan.stages > 1:
            cuts = empty_stages(plan)
            equal_gpt(plan, optimizer, layers=sum(cuts), cuts=cuts)


@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 2, 1), (2, 3, 2)])
def test_the_closed_forms_of_all_plans(p, times):
    check_closed_forms([(p, m) for m in range(1, 65)], *times)


@pytest.mark.parametrize("p", range(1, 17))
def test_the_versions_of_all_plans(p):
    check_versions([(p, m) for m in range(1, 65)])
