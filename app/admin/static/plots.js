// First tokens by tier over misses by reason, on one axis of time. uPlot draws; this says what.

import { empty, h, setText } from "./dom.js";
import { count, milliseconds, words } from "./format.js";
import { ask } from "./server.js";

const LEAST_MS = 5_000; // between two looks at the history, however fast states come
const KINDS = [["hbm", "awake"], ["dram", "from DRAM"], ["nvme", "from NVMe"], ["recomputed", "recomputed"]];
const COUNTS = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));
const REASONS = ["--recomputed", "--pinned", "--nvme", "--dram", "--open", "--computed", "--quarantined", "--moon"];

export function plots(first) {
  let chosen = first;
  let asked = 0;
  let snapshot = 0;
  let timer = 0;
  let drawn = [];
  let latest = null;
  const above = h("div", { class: "plot", role: "img" });
  const below = h("div", { class: "plot", role: "img" });
  const keys = h("ul", { class: "keys" });
  const reasons = h("ul", { class: "keys" });
  const note = h("p", { class: "note" });
  const node = h(
    "section",
    { class: "panel plots", "aria-label": "Over time" },
    h("h2", null, "First token, median ", h("span", null, "by where history was")),
    above,
    keys,
    h("h2", null, "History computed again ", h("span", null, "turns, by reason")),
    below,
    reasons,
    note,
  );
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => latest && draw(latest);
  dark.addEventListener("change", redraw);
  window.addEventListener("resize", redraw);

  async function look() {
    asked = performance.now();
    try {
      latest = await ask(`admin/api/history?window=${chosen}`);
      setText(note, "");
      draw(latest);
    } catch (error) {
      setText(note, error.message);
    }
  }

  function draw(history) {
    if (!node.isConnected) return;
    drawn.forEach((plot) => plot.destroy());
    drawn = [];
    const ink = getComputedStyle(document.documentElement);
    const colour = (name) => ink.getPropertyValue(name).trim();
    const lines = KINDS.map(([kind]) => history.first_token_p50[kind]);
    const seen = lines.flat().filter((value) => value !== null);
    const names = Object.keys(history.misses);
    // Their keys first: what these take, the plots do not have.
    above.setAttribute("aria-label", summary(lines));
    below.setAttribute("aria-label", names.length ? `Misses: ${names.map((name) => `${words(name)} ${sum(history.misses[name])}`).join(", ")}` : "No history was computed again");
    keys.replaceChildren(...KINDS.map(([kind, text]) => h("li", null, h("i", { class: `is-${kind}` }), text)));
    reasons.replaceChildren(
      ...names.map((name, index) => {
        const swatch = h("i");
        swatch.style.background = colour(REASONS[index % REASONS.length]);
        return h("li", null, swatch, `${words(name)} ${sum(history.misses[name])}`);
      }),
    );
    above.replaceChildren(...(seen.length ? [] : [empty("Nothing to show yet", "No session has had a second turn in this window.")]));
    below.replaceChildren(...(names.length ? [] : [empty("None was", "Every turn in this window found its history.")]));
    if (seen.length) drawn.push(firstTokens(above, history, lines, seen, colour));
    if (names.length) drawn.push(stacks(below, history, names, colour));
  }

  return {
    node,
    choose(name) {
      chosen = name;
      look();
    },
    update(state) {
      if (state.snapshot === snapshot) return;
      snapshot = state.snapshot;
      clearTimeout(timer);
      timer = setTimeout(look, latest === null ? 0 : Math.max(0, asked + LEAST_MS - performance.now()));
    },
    close() {
      clearTimeout(timer);
      dark.removeEventListener("change", redraw);
      window.removeEventListener("resize", redraw);
      drawn.forEach((plot) => plot.destroy());
    },
  };
}

function firstTokens(holder, history, lines, seen, colour) {
  const options = {
    ...frame(holder),
    scales: { x: spanOf(history), y: { distr: 3, range: around(seen) } },
    axes: axes(colour, (values) => values.map((value) => (value === null ? "" : milliseconds(1000 * value)))),
    series: [{}, ...KINDS.map(([kind]) => line(colour(`--${kind}`)))],
  };
  return new uPlot(options, [history.at, ...lines], holder);
}

// The highest bar of a stack is drawn first, and the others over it.
function stacks(holder, history, names, colour) {
  const options = {
    ...frame(holder),
    scales: { x: spanOf(history), y: { range: (plot, low, high) => [0, Math.max(4, high * 1.1)] } },
    axes: axes(colour, (values) => values.map(count), COUNTS),
    series: [{}, ...names.map((name, index) => bars(colour(REASONS[index % REASONS.length]))).reverse()],
  };
  return new uPlot(options, [history.at, ...stacked(names.map((name) => history.misses[name])).reverse()], holder);
}

// Half a step more on either side, or the first and the last bar would be cut.
function spanOf({ at, step_seconds: step }) {
  return { time: true, range: [at[0] - step / 2, at[at.length - 1] + step / 2] };
}

function frame(holder) {
  return {
    width: Math.max(200, holder.clientWidth),
    height: Math.max(90, holder.clientHeight),
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 8, 0, 0],
  };
}

function axes(colour, values, incrs = undefined) {
  const shared = { stroke: colour("--soft"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const time = (plot, splits) => splits.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }));
  return [{ ...shared, grid: { show: false }, values: time, size: 24, space: 60 }, { ...shared, values: (plot, splits) => values(splits), size: 56, space: 28, ...(incrs && { incrs }) }];
}

// A logarithmic axis needs some room even where there is one value, or none. It begins with one digit and a power of
// ten: from any other number uPlot's marks (1.6.32) may step beside a power of ten, and then they never end.
export function around(values) {
  const low = values.length ? Math.min(...values) : 0.01;
  const high = values.length ? Math.max(...values) : 1;
  const [digit, power] = (low / 2).toExponential().split("e");
  return [Number(`${Math.floor(Number(digit))}e${power}`), Math.max(high * 2, low * 20)];
}

function line(stroke) {
  return { stroke, width: 2, spanGaps: true, points: { show: true, size: 5, fill: stroke, stroke } };
}

function bars(fill) {
  return { fill, stroke: fill, width: 0, paths: uPlot.paths.bars({ size: [0.8, 24] }), points: { show: false } };
}

function stacked(rows) {
  const heights = rows.length ? rows[0].map(() => 0) : [];
  return rows.map((row) => row.map((value, index) => (heights[index] += value)));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function summary(lines) {
  const last = lines.map((values) => values.findLast((value) => value !== null));
  return `Median first token: ${KINDS.map(([, text], index) => `${text} ${last[index] === undefined ? "none" : milliseconds(1000 * last[index])}`).join(", ")}`;
}
