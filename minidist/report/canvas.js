(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("space-time-data").textContent);
  const figure = document.getElementById("space-time"), canvas = figure.querySelector("canvas");
  const under = figure.querySelector(".under"), context = canvas.getContext("2d");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const LINE = 24, TOP = 6, AXIS = 22, HEADS = 600, RIGHT = 8;
  const BLOCKED = 6, TRANSFER = 7, BAND = 8;  // kinds; those before compute
  const READABLE = 60, HAIR = 0.02;  // arrows outside the main streams; the shortest wait on a band, of the width

  // The numbers are steps from one start to the next; here they become bars and arrows.
  function read(flat) {
    const items = [];
    for (let i = 0, start = 0; i < flat.length; i += 5) {
      start += flat[i + 3];
      items.push([flat[i], flat[i + 1], flat[i + 2], start, start + flat[i + 4]]);
    }
    return items;
  }
  const bars = read(data.bars);
  function arrowsOf(flat) {
    const items = [];
    for (let i = 0, start = 0; i < flat.length; i += 5) {
      start += flat[i + 2];
      items.push([flat[i], flat[i + 1], start, start + flat[i + 3], flat[i + 4]]);
    }
    return items;
  }
  const arrows = arrowsOf(data.arrows), ofCalls = arrowsOf(data.of_calls);

  // A collective call outside the main streams is a band from afar, and arrows from near.
  const computing = new Set(bars.filter(bar => bar[1] < BLOCKED).map(bar => bar[0]));
  const banded = new Set(bars.filter(bar => bar[1] === BAND && !computing.has(bar[0])).map(bar => bar[0]));
  const inView = arrow => arrow[3] >= from && arrow[2] <= to;
  const isFar = () => !ofCalls.length || ofCalls.filter(inView).length > READABLE;
  function isShown([line, kind, , start, stop], far) {
    if (stop < from || start > to || (kind === BAND && !far)) return false;
    const share = (stop - start) / (to - from);
    return !(far && banded.has(line)) || kind === BAND || kind < BLOCKED || (kind === BLOCKED && share > HAIR);
  }
  let from = 0, to = data.ticks, width = 0, left = 90;
  const x = tick => left + (tick - from) / (to - from) * (width - left - RIGHT);
  const tickAt = place => from + (place - left) / (width - left - RIGHT) * (to - from);
  const y = line => TOP + (line + 0.5) * LINE;

  function time(ticks) {
    const seconds = ticks * data.seconds;
    for (const [factor, name] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]])
      if (Math.abs(seconds) * factor >= 1) return +(seconds * factor).toPrecision(4) + " " + name;
    return +(seconds * 1e9).toPrecision(4) + " ns";
  }

  function draw() {
    // One pixel of the canvas is one of the screen.
    const ratio = devicePixelRatio || 1, height = TOP + data.lines.length * LINE + AXIS;
    width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const ink = dark.matches ? "#ddd" : "#222", faint = dark.matches ? "#555" : "#ccc";
    const purple = dark.matches ? "#d873ab" : "#AA3377";  // thin lines need more light on black
    left = Math.min(130, 12 + Math.max(...data.lines.map(name => context.measureText(name).width), 20));

    // Lines with their names, and the axis.
    context.lineWidth = 1;
    data.lines.forEach((name, line) => {
      context.fillStyle = faint;
      context.fillRect(left, y(line) - 0.5, width - left - RIGHT, 1);
      context.fillStyle = ink;
      context.fillText(name, 2, y(line), left - 6);
    });
    const rough = (to - from) * data.seconds / Math.max(2, Math.floor((width - left) / 110));
    const power = 10 ** Math.floor(Math.log10(rough)), unit = power * [1, 2, 5, 10].find(m => m * power >= rough);
    context.textAlign = "center";
    const first = Math.ceil((data.begin + from * data.seconds) / unit);
    for (let n = first; unit > 0 && n * unit <= data.begin + to * data.seconds; n++) {
      const place = x((n * unit - data.begin) / data.seconds);
      context.fillStyle = faint;
      context.fillRect(place, TOP, 1, height - AXIS - TOP);
      context.fillStyle = ink;
      if (place > left + 20 && place < width - 25)
        context.fillText(time(n * unit / data.seconds), place, height - AXIS / 2);
    }

    // What lies outside the view is cut off.
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left - RIGHT, height - AXIS);
    context.clip();
    const far = isFar(), shown = bars.filter(bar => isShown(bar, far));
    for (const bar of [...shown.filter(bar => bar[1] === BAND), ...shown.filter(bar => bar[1] !== BAND)]) {
      const [line, kind, name, start, stop] = bar, thin = kind === BAND && computing.has(line);
      const a = Math.max(x(start), left - 2), b = Math.min(x(stop), width), w = Math.max(b - a, 0.7);
      context.globalAlpha = thin ? 0.75 : 1;
      context.fillStyle = data.kinds[kind][0];
      context.fillRect(a, y(line) - (thin ? -3 : 7), w, thin ? 6 : 14);
      context.globalAlpha = 1;
      const text = data.names[name];
      if (kind !== BAND && text && w > 8 && context.measureText(text).width + 6 < w) {
        context.fillStyle = kind === 2 || kind === 3 ? "#111" : "#fff";
        context.fillText(text, (a + b) / 2, y(line) + 0.5);
      }
      if (w > 4 && !thin) {
        context.fillStyle = dark.matches ? "#1b1b1d" : "#fff";
        context.fillRect(a + w - 0.6, y(line) - 7, 0.6, 14);
      }
    }

    // Arrows, with heads while they can be told apart.
    const seen = (far ? arrows : [...arrows, ...ofCalls]).filter(inView);
    const heads = seen.length <= HEADS;
    context.strokeStyle = context.fillStyle = purple;
    context.lineWidth = heads ? 1 : 0.4;
    for (const [tail, head, start, stop] of seen) {
      const [a, b, c, d] = [x(start), y(tail), x(stop), y(head)];
      context.beginPath();
      context.moveTo(a, b);
      context.lineTo(c, d);
      context.stroke();
      if (heads) {
        const angle = Math.atan2(d - b, c - a);
        context.beginPath();
        context.moveTo(c, d);
        context.lineTo(c - 7 * Math.cos(angle - 0.3), d - 7 * Math.sin(angle - 0.3));
        context.lineTo(c - 7 * Math.cos(angle + 0.3), d - 7 * Math.sin(angle + 0.3));
        context.fill();
      }
    }
    context.restore();
    context.textAlign = "left";
  }

  let asked = false;
  function again() {
    if (!asked) requestAnimationFrame(() => { asked = false; draw(); });
    asked = true;
  }
  function view(a, b) {
    const size = Math.min(Math.max(b - a, 40), data.ticks);
    from = Math.min(Math.max(a, 0), data.ticks - size);
    to = from + size;
    again();
  }
  function zoom(factor, middle) {
    view(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  // At the widest view the wheel scrolls the page, so that the picture does not hold it.
  canvas.addEventListener("wheel", event => {
    if (event.deltaY > 0 && to - from >= data.ticks) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), tickAt(event.offsetX));
  }, {passive: false});

  // One pointer moves, two zoom.
  const pointers = new Map();
  canvas.addEventListener("pointerdown", event => {
    pointers.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", event => {
    if (!pointers.has(event.pointerId)) { name(event.offsetX, event.offsetY); return; }
    const before = [...pointers.values()];
    pointers.set(event.pointerId, event.offsetX);
    const now = [...pointers.values()];
    if (now.length === 1) {
      const step = tickAt(before[0]) - tickAt(now[0]);
      view(from + step, to + step);
    } else {
      const spread = Math.abs(before[0] - before[1]) / Math.max(Math.abs(now[0] - now[1]), 1);
      zoom(spread, tickAt((now[0] + now[1]) / 2));
    }
  });
  for (const end of ["pointerup", "pointercancel"])
    canvas.addEventListener(end, event => pointers.delete(event.pointerId));

  function act(what) {
    const middle = (from + to) / 2, step = (to - from) / 4;
    if (what === "in") zoom(0.5, middle);
    else if (what === "out") zoom(2, middle);
    else if (what === "all") view(0, data.ticks);
    else if (what === "left") view(from - step, to - step);
    else if (what === "right") view(from + step, to + step);
  }
  for (const button of figure.querySelectorAll("button"))
    button.addEventListener("click", () => act(button.dataset.do));
  const keys = {"+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right"};
  canvas.addEventListener("keydown", event => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    act(keys[event.key]);
  });

  // What is under the pointer: a message within four pixels, else a bar.
  function name(px, py) {
    const line = Math.floor((py - TOP) / LINE), at = tickAt(px), far = isFar();
    const arrow = (far ? arrows : [...arrows, ...ofCalls]).find(([tail, head, start, stop]) => {
      const part = (py - y(tail)) / (y(head) - y(tail));
      return part >= 0 && part <= 1 && Math.abs(x(start + part * (stop - start)) - px) < 4;
    });
    const bar = bars.find(bar => bar[0] === line && bar[3] <= at && at <= bar[4] && isShown(bar, far));
    under.textContent = arrow
      ? `${arrow[4].toLocaleString("en")} B, ${data.lines[arrow[0]]} to ${data.lines[arrow[1]]}, ` +
        time(arrow[3] - arrow[2])
      : bar ? `${data.names[bar[2]] || data.kinds[bar[1]][1]}, ${time(bar[4] - bar[3])}, ${data.lines[line]}` : "";
  }

  addEventListener("resize", again);
  dark.addEventListener("change", again);
  draw();
})();
