"""The viewer's rules ("Trace Event Format"), written independently of the export that must keep them."""

from collections import defaultdict
from numbers import Real

KNOWN = {"X", "M", "C", "s", "f"}
METADATA = {"process_name", "thread_name", "thread_sort_index", "process_sort_index"}
SLACK = 1e-6  # µs: sums of floats


def broken_rules(document):
    """One sentence for each rule that is broken."""
    problems = []
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["the document is no object with a list `traceEvents`"]
    if document.get("displayTimeUnit") not in (None, "ms", "ns"):
        problems.append("displayTimeUnit is neither ms nor ns")
    slices, flows, named = defaultdict(list), defaultdict(list), set()
    for event in document["traceEvents"]:
        kind = event.get("ph")
        if kind not in KNOWN:
            problems.append(f"phase {kind!r} is unknown")
            continue
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("name"), str):
            problems.append(f"{event}: pid or name is missing")
        if kind == "M":
            if event["name"] not in METADATA or not isinstance(event.get("args"), dict):
                problems.append(f"{event}: metadata without a known name and args")
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        if not isinstance(event.get("ts"), Real) or event["ts"] < 0:
            problems.append(f"{event}: no time stamp")
        if kind == "C":
            if not event["args"] or not all(isinstance(value, Real) for value in event["args"].values()):
                problems.append(f"{event}: a counter's args are numbers")
            continue
        if not isinstance(event.get("tid"), int):
            problems.append(f"{event}: no thread")
        if kind == "X":
            if not isinstance(event.get("dur"), Real) or event["dur"] < 0:
                problems.append(f"{event}: a complete event has a duration of at least 0")
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            if "id" not in event:
                problems.append(f"{event}: a flow has an id")
            flows[event.get("cat"), event["name"], event.get("id")].append(event)
    problems += [f"thread {thread} has no name" for thread in set(slices) - named]
    for thread, intervals in slices.items():
        problems += _nest(thread, intervals)
    for key, ends in flows.items():
        if [end["ph"] for end in sorted(ends, key=lambda e: (e["ts"], e["ph"] == "f"))] != ["s", "f"]:
            problems.append(f"flow {key} is not one start and then one end")
        for end in ends:
            around = slices[end["pid"], end["tid"]]
            if not any(start - SLACK <= end["ts"] <= stop + SLACK for start, stop in around):
                problems.append(f"flow {key}: no slice around its {end['ph']}")
    return problems


def _nest(thread, intervals):
    """Slices of a thread lie apart or inside each other."""
    problems, open_ = [], []
    for start, stop in sorted(intervals, key=lambda i: (i[0], -i[1])):
        while open_ and open_[-1] <= start + SLACK:
            open_.pop()
        if open_ and stop > open_[-1] + SLACK:
            problems.append(f"thread {thread}: a slice from {start} to {stop} crosses one that ends at {open_[-1]}")
        open_.append(stop)
    return problems
