"""How many GPUs: for several numbers of them what the best layout of each costs, as ranges, and one sentence.

    days = tokens / tokens per second / 86,400        GPU hours = days x 24 x GPUs        cost = GPU hours x price

A range follows from that of a step's seconds (`Plan.seconds_range`). Two numbers are equal within the error when their
ranges overlap.

Proved by: tests/planning/test_decision.py
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.planning.cluster.gpus import Machine
from minidist.planning.cluster.layout import Job
from minidist.planning.cluster.search import Plan, remedies, search

Range = tuple[float, float, float]  # the least, the central estimate, the most
DAY = 86_400


def ranges(plan: Plan, tokens: float | None, price: float | None) -> dict[str, Range]:
    """Return tokens per second, and with `tokens` days and GPU hours, and with a price per GPU hour the cost."""
    short, long = plan.seconds_range
    per_step = plan.job.global_batch * plan.job.length
    result = {"tokens_per_second": (per_step / long, plan.tokens_per_second, per_step / short)}
    if tokens is None:
        return result
    low, central, high = (tokens / per_step * seconds / DAY for seconds in (short, plan.time.seconds, long))
    result["days"] = low, central, high
    result["gpu_hours"] = low * 24 * plan.job.gpus, central * 24 * plan.job.gpus, high * 24 * plan.job.gpus
    if price is not None:
        low, central, high = result["gpu_hours"]
        result["cost"] = low * price, central * price, high * price
    return result


@dataclass(frozen=True)
class Offer:
    """What a number of GPUs offers: its best layout with its ranges, or the reason why there is none."""

    gpus: int
    plan: Plan | None
    ranges: Mapping[str, Range]
    reason: str = ""

    @property
    def verdict(self) -> str:
        """Return whether a layout fits: yes, may not, or no."""
        return "no" if self.plan is None else self.plan.fit.verdict

    @property
    def cost_of_a_token(self) -> Range:
        """Return the GPU seconds of a token."""
        slow, central, fast = self.ranges["tokens_per_second"]
        return self.gpus / fast, self.gpus / central, self.gpus / slow

    def as_dict(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {
            "ranks": self.gpus,
            "fits": self.verdict != "no",
            "fits_with_range": self.verdict == "yes",
            **ranges_as_dict(self.ranges),
            "layout": None if self.plan is None else self.plan.as_dict(),
            "reason": self.reason,
        }


def ranges_as_dict(of: Mapping[str, Range]) -> dict[str, dict[str, float]]:
    """Return ranges by name, each with its three numbers by name."""
    return {name: dict(zip(("low", "central", "high"), three, strict=True)) for name, three in of.items()}


def offers(
    job: Job,
    machine: Machine,
    fixed: Mapping[str, Any],
    counts: Iterable[int],
    tokens: float | None = None,
    price: float | None = None,
) -> list[Offer]:
    """Return the best layout of each number of GPUs: of those that surely fit the fastest, where there is one."""
    result = []
    for gpus in sorted(set(counts)):
        try:
            found = search(replace(job, gpus=gpus), machine, fixed)
        except UsageError as error:
            result.append(Offer(gpus, None, {}, str(error)))
            continue
        if found.plans:
            result.append(Offer(gpus, found.plans[0], ranges(found.plans[0], tokens, price)))
        else:
            result.append(Offer(gpus, None, {}, found.too_large[0].shortage))
    return result


def smallest(found: Sequence[Offer]) -> Offer | None:
    """Return the smallest number of GPUs on which a layout surely fits."""
    return next((offer for offer in found if offer.verdict == "yes"), None)


def offers_table(found: Sequence[Offer]) -> str:
    """Format the numbers of GPUs, one per line."""
    names = list(dict.fromkeys(name for offer in found for name in offer.ranges))
    titles = {"tokens_per_second": "tokens/s", "days": "days", "gpu_hours": "GPU hours", "cost": "cost"}
    lines = [f"{'GPUs':>9}  {'fits':7}" + "".join(f"  {titles[name]:>24}" for name in names) + "  layout"]
    for offer in found:
        cells = "".join(f"  {_written(offer.ranges[name]):>24}" for name in names if offer.ranges)
        lines.append(
            f"{offer.gpus:9,}  {offer.verdict:7}{cells}  {offer.reason if offer.plan is None else offer.plan.layout}"
        )
    return "\n".join(lines)


def _written(three: Range) -> str:
    low, _, high = three
    digits = 0 if high >= 100 else 1
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def answer(found: Sequence[Offer], job: Job, machine: Machine, fixed: Mapping[str, Any]) -> str:
    """Return one sentence: the smallest number of GPUs that surely fits, and how the costs of all compare."""
    first = smallest(found)
    if first is None:
        perhaps = next((offer for offer in found if offer.plan is not None), None)
        if perhaps is not None:
            return f"none of these numbers of GPUs surely fits; {perhaps.gpus:,} may, if memory is at the low end"
        ways = remedies(replace(job, gpus=found[-1].gpus), machine, fixed)
        return "no layout of these numbers of GPUs fits" + (
            f"; something fits with {', or '.join(ways)}" if ways else ""
        )
    assert first.plan is not None
    text = f"{first.gpus:,} is the smallest of these numbers of GPUs on which a layout surely fits"
    if first.plan.layout.host != "none":
        text += (
            f", with {first.plan.layout.host} in host memory, for which GPUs wait {first.plan.waiting:.0%} of a step"
        )
    return "; ".join([text, *_compared([offer for offer in found if offer.verdict == "yes"])])


def _compared(sure: Sequence[Offer]) -> list[str]:
    """Return which of the numbers of GPUs cost the same per token, and how much more the others do."""
    if len(sure) == 1:
        return []
    low_first = sorted(sure, key=lambda offer: offer.cost_of_a_token[1])
    cheapest = low_first[0]
    same = [offer for offer in sure if overlap(offer.cost_of_a_token, cheapest.cost_of_a_token)]
    parts = []
    if len(same) > 1:
        slow, fast = same[0], same[-1]
        share = _speed(slow) / _speed(fast)
        parts.append(
            f"a run costs the same within the error on {', '.join(f'{offer.gpus:,}' for offer in same)}, and takes"
            f" {share:.2f} times as long on {fast.gpus:,} as on {slow.gpus:,}"
        )
    dearer = [offer for offer in sure if offer not in same]
    ratios = [
        f"{offer.cost_of_a_token[1] / cheapest.cost_of_a_token[1]:.2f} times on {offer.gpus:,}" for offer in dearer
    ]
    return parts + ([f"it costs {', '.join(ratios)} what it costs on {cheapest.gpus:,}"] if ratios else [])


def _speed(offer: Offer) -> float:
    return offer.ranges["tokens_per_second"][1]


def overlap(a: Range, b: Range) -> bool:
    """Return whether two ranges overlap."""
    return a[0] <= b[2] and b[0] <= a[2]
