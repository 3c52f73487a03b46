"""Arguments of a wrong kind: one sentence that says what was passed and what to pass."""

import numpy as np
import pytest

from minidist import GPT, MLP, AdamW, GPTConfig, Pipeline, SimWorld, fully_shard, split_model
from minidist.core.base.errors import MinidistError
from minidist.core.nn.flat import FlatParameters
from minidist.optim import Muon
from minidist.pipeline.schedules import get_schedule
from tests.cases import each

CALLS = {
    "a number to shard": (lambda c: fully_shard(3, mesh=c), r"a value of type int as its.*\(model, mesh=comm\)"),
    "a name as a plan": (lambda c: Pipeline(c, "1f1b", [], None), r"got '1f1b' as its plan; pass get_schedule"),
    "no schedule": (lambda c: get_schedule(None), "unknown schedule 'None'; there are 1f1b"),
    "a stage too many": (lambda c: split_model(MLP([2, 2, 2]), 2, [7]), "no stage 7 of 2; number them from 0 to 1"),
    "a stage from the end": (lambda c: split_model(MLP([2, 2, 2]), 2, [-1]), "no stage -1 of 2"),
    "no padding": (lambda c: FlatParameters([], pad_to=0), "pad_to=0; it must be a whole number of at least 1"),
    "no state": (lambda c: MLP([2, 2]).load_state_dict(None), "got a NoneType; pass a dict, as state_dict"),
    "no step": (
        lambda c: AdamW(MLP([2, 2]).parameters()).load_state_dict({}),
        "needs a dict with 'step' and 'state', as",
    ),
    "one size": (lambda c: MLP(3), r"MLP\(3\) has no layer; pass the sizes"),
    "a negative size": (lambda c: MLP([3, -2]), r"sizes\[1\]=-2; it must be a whole number of at least 1"),
    "one text": (lambda c: GPT(GPTConfig(7, 4, 8, 1, 2))(np.arange(3)), r"shape \(3,\).*one text is \(1, T\)"),
    "an unknown setting": (lambda c: Muon(MLP([2, 2]).parameters(), nosuch=1), "Muon has no argument 'nosuch'; of"),
}


@each("call", CALLS.values(), ids=list(CALLS))
def test_an_argument_of_a_wrong_kind_is_refused_in_one_sentence(call):
    made, words = call
    with pytest.raises(MinidistError, match=words):
        SimWorld(1).run(made)
