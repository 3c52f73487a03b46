"""One colour per thing, the same in every picture, so that a reader learns them once.

Proved by: tests/report/test_pictures.py, tests/report/test_colours.py
"""

from collections.abc import Sequence

from minidist.core.base.errors import UsageError

PALETTE = {
    "F": "#4477AA",
    "B": "#228833",
    "I": "#66CCEE",
    "W": "#CCBB44",
    "recompute": "#EE6677",
    "communication": "#AA3377",
    "transfer": "#AA337755",  # a third of communication, on white and on black
    "idle": "#F0F0F0",
    "compute": "#7F7F9F",
    "blocked": "#CC3311",
    "other": "#BBBBBB",
}

NAMES = {
    "F": "F forward",
    "B": "B full backward",
    "I": "I input gradient",
    "W": "W weight gradient",
    "recompute": "recompute",
    "communication": "communication",
    "transfer": "waits for bytes on their way",
    "idle": "idle",
    "compute": "compute",
    "blocked": "blocked: waits for another rank",
    "other": "other",
}

_WORDS = {"forward": "F", "backward": "B", "input gradient": "I", "weight gradient": "W", "recompute": "recompute"}

# Memory is stacked by purpose; neighbours in the stack differ in hue and in lightness.
MEMORY = {
    "parameter": "#4477AA",
    "gradient": "#228833",
    "optimizer": "#CCBB44",
    "activation": "#66CCEE",
    "activation_gradient": "#EE99AA",
    "communication": "#AA3377",
    "unsharded": "#332288",
    "stash": "#EE8866",
    "workspace": "#888888",
    "input": "#885533",
}

# Ranks, where the picture is about who holds what.
RANKS = ("#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF", "#BBCC33", "#AAAA00")


# Messages of one rank, where it sends for several purposes: shades of the colour of communication.
MESSAGES = (PALETTE["communication"], "#DD99BB", "#55193B", "#EEBBAA")

# For what has no colour here: purposes of a user's program, more runs than a picture has colours for.
SPARE = ("#BBBBBB", "#882255", "#CC6677", "#6699CC", "#661100", "#117733", "#AA4499", "#777777")


def distinct(colours: Sequence[str], count: int) -> list[str]:
    """Return `count` different colours: first these, then those of SPARE, then lighter ones of both.

    Raises UsageError for more than there are.
    """
    base = [*colours, *(colour for colour in SPARE if colour not in colours)]
    found = dict.fromkeys([*base, *(shade(colour, 1) for colour in base)])
    if count > len(found):
        raise UsageError(f"a picture shows at most {len(found)} lines that can be told apart, and not {count}")
    return list(found)[:count]


def shade(colour: str, chunk: int) -> str:
    """Return the colour of a rank's stage `chunk` (0, 1, ...): the later the stage, the lighter, up to two thirds."""
    part = min(0.45 * chunk, 0.66)
    return "#" + "".join(f"{round(int(colour[at : at + 2], 16) * (1 - part) + 255 * part):02X}" for at in (1, 3, 5))


def ink(colour: str) -> str:
    """Return a dark ink or white, whichever is read better on the colour; a page in dark mode changes neither."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "white"


def kind_of(name: str) -> str:
    """Return the palette's name for a span: "F3", "2F3" (stage 2) and "forward 3" are F; an unknown one is compute."""
    # A leading number is the stage; then the kind, in a plan's letter or in a trace's word.
    name = name.lstrip("0123456789")
    if name.startswith("RECOMPUTE"):
        return "recompute"
    for word, kind in _WORDS.items():
        if name.startswith(word):
            return kind
    return name[0] if name[:1] in {"F", "B", "I", "W"} and not name[1:2].isalpha() else "compute"
