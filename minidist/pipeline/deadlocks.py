"""Receives that are posted earlier, so that a lowered plan cannot deadlock even where sends are synchronous.

    rank 0   .. 3SEND_F0 ..                      blocks until rank 1 has posted 4RECV_F0
    rank 1   .. 1SEND_F1 .. 4RECV_F0 ..          blocks too: 4RECV_F0 moves in front of it, for one more buffer

The lowered order is simulated with sends that block until the receive is posted. An order that passes cannot deadlock.

Proved by: tests/pipeline/test_plans.py
"""

from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan import Action, Item, Key, Plan, actions_of
from minidist.pipeline.simulate import Dependencies, Simulation, partner


def prevent_deadlocks(plan: Plan, orders: list[list[Item]], rank_of: dict[Key, int]) -> None:
    """Move receives forward in `orders` until they finish with sends that block."""
    simulation = Simulation(orders, Dependencies(plan).needs)
    simulation.run()
    while simulation.blocked:
        # One more buffer for the first send that blocks: its receive, and those of its neighbour before it, are posted
        # where the receiver stands.
        sends = [
            action
            for rank in simulation.blocked
            for action in actions_of(orders[rank][simulation.position[rank]])
            if action.kind.startswith("SEND")
        ]
        if not sends:
            raise deadlock_error(plan)
        receive = partner(sends[0])
        receiver = rank_of[receive.stage, receive.microbatch]
        _post_now(orders[receiver], simulation.position[receiver], receive)
        simulation.run()


def _post_now(order: list[Item], at: int, receive: Action) -> None:
    """Post `receive`, and those of the same neighbour before it, at place `at`; the later ones move up."""
    places = [
        place
        for place in range(at, len(order))
        if (action := actions_of(order[place])[0]).kind == receive.kind and action.stage == receive.stage
    ]
    receives = [order[place] for place in places]
    count = receives.index(receive) + 1
    for place, later in zip(places, receives[count:], strict=False):
        order[place] = later
    for place in reversed(places[len(places) - count :]):
        del order[place]
    order[at:at] = receives[:count]


def deadlock_error(plan: Plan) -> UsageError:
    """Return the error of a plan whose ranks wait for one another."""
    return UsageError(f"plan {plan.name!r} deadlocks; validate it first (minidist.pipeline.validate)")
