"""The stepper's steps as a moving picture for slides: one frame for each message, or for each time of a schedule.

Proved by: tests/report/test_stepper.py
"""

from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH, LEFT, TOP, MILLISECONDS = 900, 100, 34, 700
INK, FAINT, NEW = "#222222", "#666666", "#CC3311"

Spot = tuple[float, float]
Spots = list[Spot]


def gif(data: dict[str, Any], row: int, height: int) -> bytes:
    """Return the steps of a stepper's `data` as a GIF; row, height: pixels of a line of cells, and of the picture."""
    from PIL import Image, ImageDraw

    frames = []
    for now in range(len(data["steps"]) + 1):
        frame = Image.new("RGB", (WIDTH, height), "white")
        pen = ImageDraw.Draw(frame)
        _draw(pen, data, now, row)
        frames.append(frame.quantize(64))
    stream = BytesIO()
    times = [MILLISECONDS] * (len(frames) - 1) + [4 * MILLISECONDS]
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
    return stream.getvalue()


def _draw(pen: "ImageDraw", data: dict[str, Any], now: int, row: int) -> None:
    """Draw what there is after `now` steps."""
    step = data["steps"][now - 1] if now else {}
    about = f"step {now} of {len(data['steps'])}"
    if "from" in step:
        about += f": rank {step['from']} sends {step['bytes']:,} B to rank {step['to']}"
    pen.text((4, 8), about, fill=INK, font_size=14)

    # The arrays of each rank; the middle of each cell, and which cells have just changed.
    y = TOP
    spots: dict[tuple[int, int], Spots] = {}
    changed: dict[int, Spots] = {}
    edge: dict[int, Spot] = {}
    if "from" in data["steps"][0]:
        for rank, arrays in enumerate(data["arrays"]):
            pen.text((4, y + 4), f"rank {rank}", fill=INK, font_size=13)
            edge[rank] = (LEFT - 20, y + row // 2)
            for number, array in enumerate(arrays):
                cells = _cells(pen, data, array, now, (y, row))
                spots[rank, number] = [place for place, _ in cells]
                changed.setdefault(rank, []).extend(place for place, is_new in cells if is_new)
                y += row * (1 + (len(cells) - 1) // data["cells"])
            y += row if not arrays else 6
    if data["spans"]:
        _bars(pen, data, step.get("time", -1.0) if now < len(data["steps"]) else float("inf"), y, row)
    if "from" in step:
        source, target = step["source"], step["target"]
        tail = spots[step["from"], source[0]][source[1] : source[2]] if source else [edge[step["from"]]]
        head = spots[step["to"], target[0]][target[1] : target[2]] if target else changed.get(step["to"])
        # An arrow with a round head, which needs no angle.
        end = _middle(head or [edge[step["to"]]])
        pen.line((*_middle(tail), *end), fill=NEW, width=2)
        pen.ellipse((end[0] - 4, end[1] - 4, end[0] + 4, end[1] + 4), fill=NEW)


def _cells(
    pen: "ImageDraw", data: dict[str, Any], array: dict[str, Any], now: int, lines: tuple[int, int]
) -> list[tuple[Spot, bool]]:
    """Draw an array; return the middle of each cell, and whether it has changed. lines: the first y, a height."""
    (y, row), cells = lines, []
    held = [values for at, values in array["changes"] if at < now][-1]
    before = [values for at, values in array["changes"] if at < max(now - 1, 0)][-1]
    last, size = array["changes"][-1][1], (WIDTH - LEFT - 10) // data["cells"]
    for i, text in enumerate(held):
        x, top = LEFT + i % data["cells"] * size, y + i // data["cells"] * row
        is_new = now > 0 and text != before[i]
        # An element with its last value is filled, and one whose value is not known yet is empty.
        colour = "white" if not text else data["colours"][0] if text == last[i] else "#E4ECF5"
        box = (x, top, x + size - 3, top + row - 4)
        pen.rectangle(box, fill=colour, outline=NEW if is_new else "#BBBBBB", width=2 if is_new else 1)
        pen.text((x + size / 2 - 1, top + row / 2 - 2), text, fill=INK, anchor="mm", font_size=11)
        cells.append(((x + size / 2, top + row / 2), is_new))
    return cells


def _bars(pen: "ImageDraw", data: dict[str, Any], time: float, y: int, row: int) -> None:
    """Draw the computations that have begun at `time`, a line for each rank."""
    scale = (WIDTH - LEFT - 10) / max(span[4] for span in data["spans"])
    for rank in range(data["ranks"]):
        pen.text((4, y + rank * row + 4), f"rank {rank}", fill=INK, font_size=13)
    for rank, name, colour, start, end in data["spans"]:
        if start <= time:
            x, stop, top = LEFT + start * scale, LEFT + end * scale, y + rank * row
            pen.rectangle((x, top, stop - 1, top + row - 5), fill=colour)
            if stop - x > 7 * len(name):
                pen.text(((x + stop) / 2, top + row / 2 - 2), name, fill="white", anchor="mm", font_size=11)


def _middle(places: Spots) -> Spot:
    return sum(x for x, _ in places) / len(places), places[0][1]
