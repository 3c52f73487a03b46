(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const slider = document.querySelector("input"), said = document.querySelector(".said");
  const drawn = document.querySelector(".drawn"), play = document.querySelector("[data-do=play]");
  const WIDTH = 900, LEFT = 100, CELL = Math.floor((WIDTH - LEFT - 10) / data.cells), ROW = data.row;
  const steps = data.steps;
  let now = 0, timer = 0;  // now: how many steps have been taken
  slider.max = steps.length;

  // The elements that are ever sent together have one colour.
  function cuts(rank, number) {
    const found = new Set([0]);
    for (const step of steps)
      for (const [who, place] of [[step.from, step.source], [step.to, step.target]])
        if (who === rank && place && place[0] === number) { found.add(place[1]); found.add(place[2]); }
    return [...found].sort((a, b) => a - b);
  }
  const arrays = data.arrays.map((row, rank) => row.map((array, number) => {
    const bounds = cuts(rank, number), size = array.changes[0][1].length;
    const chunk = [...Array(size).keys()].map(i => bounds.filter(bound => bound <= i).length - 1);
    return {...array, size, chunk, lines: Math.ceil(size / data.cells)};
  }));

  // What an array holds after `count` steps, and before the last of them.
  function held(array, count) {
    let values = array.changes[0][1];
    for (const [step, those] of array.changes) if (step < count) values = those;
    return values;
  }

  function time(seconds) {
    for (const [factor, name] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]])
      if (Math.abs(seconds) * factor >= 1) return +(seconds * factor).toPrecision(4) + " " + name;
    return seconds ? +(seconds * 1e9).toPrecision(4) + " ns" : "0 s";
  }

  function sentence() {
    if (!now) return `Before the first of ${steps.length} steps. Press the right arrow key, or space to play.`;
    const step = steps[now - 1];
    if (step.from === undefined) {
      const starts = data.spans.filter(span => span[3] === step.time).map(span => `${span[1]} on rank ${span[0]}`);
      return `Step ${now} of ${steps.length}, time ${+step.time.toPrecision(6)}: ${starts.join(", ")} begins.`;
    }
    const part = step.source ? `elements ${step.source[1]} to ${step.source[2] - 1}, ` : "";
    const what = step.what === "message" ? "" : ` (${step.what})`;
    return `Step ${now} of ${steps.length}: rank ${step.from} sends ${part}${step.bytes.toLocaleString("en")} B`
      + ` to rank ${step.to}${what}; it arrives at ${time(step.time)}.`;
  }

  const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

  // The cells of one array, from the line y on; `where` gets the middle of each cell.
  function cells(array, y, where) {
    const values = held(array, now), before = held(array, now - 1), end = array.changes[array.changes.length - 1][1];
    let parts = "";
    for (let i = 0; i < array.size; i++) {
      const x = LEFT + (i % data.cells) * CELL, top = y + Math.floor(i / data.cells) * ROW;
      const isNew = now > 0 && values[i] !== before[i];
      // An element with its last value is filled, and one whose value is not known yet is empty.
      const fill = values[i] === "" ? 0 : values[i] === end[i] ? 1 : 0.35;
      const colour = data.colours[array.chunk[i] % data.colours.length];
      parts += `<rect class="cell" x="${x}" y="${top}" width="${CELL - 2}" height="${ROW - 4}" rx="3" fill="#fff"/>`
        + `<rect class="${isNew ? "new" : "cell"}" x="${x}" y="${top}" width="${CELL - 2}" height="${ROW - 4}" rx="3"`
        + ` fill="${colour}" fill-opacity="${fill}"/>`
        + `<text class="cell" x="${x + CELL / 2 - 1}" y="${top + ROW - 10}">${escaped(values[i])}</text>`;
      where.push({x: x + CELL / 2 - 1, y: top + ROW / 2 - 2, isNew});
    }
    return parts;
  }

  // The middle of what a message leaves from, or of what has changed where it arrives.
  function end(place, mine, rankY) {
    let spots = place ? mine[place[0]].slice(place[1], place[2]) : mine.flat().filter(spot => spot.isNew);
    if (!spots.length) return {x: LEFT - 30, y: rankY};
    return {x: spots.reduce((sum, spot) => sum + spot.x, 0) / spots.length, y: spots[0].y};
  }

  function bars(y) {
    // What has started by now; the whole run has one scale.
    const last = Math.max(...data.spans.map(span => span[4])), scale = (WIDTH - LEFT - 10) / last;
    const at = now === steps.length ? Infinity : now ? steps[now - 1].time : -1;
    let parts = "";
    for (const [rank, name, colour, start, stop] of data.spans) {
      if (start > at) continue;
      const x = LEFT + start * scale, width = Math.max((stop - start) * scale, 1), top = y + rank * ROW;
      parts += `<rect x="${x}" y="${top}" width="${width}" height="${ROW - 5}" fill="${colour}" stroke="#fff"`
        + ` stroke-width=".5"><title>${escaped(name)}</title></rect>`;
      if (width > 7 * name.length)
        parts += `<text class="bar" x="${x + width / 2}" y="${top + 15}">${escaped(name)}</text>`;
    }
    for (let rank = 0; rank < data.ranks; rank++) parts += `<text x="4" y="${y + rank * ROW + 15}">rank ${rank}</text>`;
    return parts;
  }

  function draw() {
    let y = 4, parts = "";
    const spots = [], rankY = [];
    if (steps[0].from !== undefined) arrays.forEach((row, rank) => {
      rankY.push(y + 12);
      parts += `<text x="4" y="${y + 16}">rank ${rank}</text>`;
      spots.push(row.map((array, number) => {
        const where = [], name = y + (number ? 16 : 30);  // the first one's is below the rank
        parts += cells(array, y, where) + `<text class="faint" x="4" y="${name}">${escaped(array.about)}</text>`;
        y += Math.max(array.lines * ROW, number ? 0 : ROW + 10);
        return where;
      }));
      y += row.length ? 6 : ROW;
    });
    if (data.spans.length) { parts += bars(y); y += data.ranks * ROW; }

    const step = now ? steps[now - 1] : {};
    if (step.from !== undefined) {
      const a = end(step.source, spots[step.from], rankY[step.from]);
      const b = end(step.target, spots[step.to], rankY[step.to]);
      const x = (a.x + b.x) / 2 + (a.x === b.x ? 40 : 0), middle = (a.y + b.y) / 2;
      parts += `<path class="arrow" marker-end="url(#head)" d="M${a.x} ${a.y} Q${x} ${middle} ${b.x} ${b.y}"/>`;
    }
    const head = `<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5"`
      + ` orient="auto"><path d="M0 0L8 4L0 8z" fill="#cc3311"/></marker></defs>`;
    drawn.innerHTML = `<svg viewBox="0 0 ${WIDTH} ${y}" aria-hidden="true">${head}${parts}</svg>`;
    said.textContent = sentence();
    slider.value = now;
  }

  function go(to) { now = Math.min(Math.max(to, 0), steps.length); draw(); }
  function stop() { clearInterval(timer); timer = 0; play.textContent = "▶▶"; }
  function toggle() {
    if (timer) return stop();
    if (now === steps.length) go(0);
    play.textContent = "❚❚";
    timer = setInterval(() => { go(now + 1); if (now === steps.length) stop(); }, 900);
  }
  const does = {first: () => go(0), back: () => go(now - 1), on: () => go(now + 1), last: () => go(steps.length)};
  const keys = {ArrowLeft: "back", ArrowRight: "on", Home: "first", End: "last"};
  document.addEventListener("click", event => {
    const name = event.target.dataset.do;
    if (name === "play") toggle(); else if (name) { stop(); does[name](); }
  });
  document.addEventListener("keydown", event => {
    if (event.key === " " && event.target.tagName !== "BUTTON") { toggle(); event.preventDefault(); }
    if (keys[event.key] && event.target !== slider) { stop(); does[keys[event.key]](); event.preventDefault(); }
  });
  slider.addEventListener("input", () => { stop(); go(+slider.value); });
  draw();
})();
