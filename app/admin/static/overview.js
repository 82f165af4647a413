// The first screen: a verdict, ten numbers, the tiers with what moves between them, plots, and the last turns.

import { bar, empty, fillBar, h, setClass, setText, svg } from "./dom.js";
import { TIERS, TIER_NAMES, clock, count, gigabytes, milliseconds, moment, percent, size, words } from "./format.js";
import { plots } from "./plots.js";

const WINDOWS = [["15m", "15 min"], ["1h", "1 h"], ["24h", "24 h"]];
const TIER_WORDS = { hbm: "awake", dram: "asleep", nvme: "asleep on disk" };
const KEY = "dormouse-window";

export function overview(main) {
  let chosen = sessionStorage.getItem(KEY) ?? "1h";
  let latest = null;
  const verdict = verdictLine();
  const numbers = numbersPanel(chosen, (name) => {
    chosen = name;
    sessionStorage.setItem(KEY, name);
    draw.choose(name);
    if (latest) numbers.update(latest, chosen);
  });
  const tiers = tiersPanel();
  const draw = plots(chosen);
  const turns = turnsPanel();
  let isThere = false;

  return {
    update(state) {
      if (!isThere) {
        main.replaceChildren(verdict.node, numbers.node, h("div", { class: "columns" }, tiers.node, draw.node, turns.node));
        isThere = true;
      }
      latest = state;
      verdict.update(state.verdict);
      numbers.update(state, chosen);
      tiers.update(state);
      draw.update(state);
      turns.update(state.last_turns);
    },
    close: draw.close,
  };
}

function verdictLine() {
  const text = h("p", { id: "verdict" });
  const node = h("section", { class: "verdict", "aria-label": "Verdict" }, h("h1", { class: "hidden" }, "Overview"), text);
  let said = "";
  return {
    node,
    update(verdict) {
      setClass(node, `verdict is-${verdict.level}`);
      if (said === verdict.sentence) return;
      said = verdict.sentence;
      const [lead, ...rest] = said.split(/(?<=:)/);
      // A flag and its value stand out: they are what to type.
      const parts = rest.join("").split(/(--[a-z-]+(?: [\w.-]*\d[\w.]*| every-turn)?)/);
      text.replaceChildren(h("strong", null, lead), ...parts.map((part) => (part.startsWith("--") ? h("code", null, part) : part)));
      text.dataset.rule = verdict.rule;
    },
  };
}

function numbersPanel(chosen, onChoose) {
  const since = h("span", { class: "since" });
  const buttons = WINDOWS.map(([name, label]) =>
    h("button", { type: "button", "aria-pressed": String(name === chosen), "data-window": name, onclick: () => onChoose(name) }, label),
  );
  const head = h("div", { class: "switch", role: "group", "aria-label": "Window of the ten numbers" }, buttons, since);
  const list = h("dl", { class: "tiles" });
  const cells = [];
  return {
    node: h("section", { class: "numbers", "aria-label": "Ten numbers" }, head, list),
    update(state, name) {
      buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.window === name)));
      const window = state.windows[name];
      setText(since, window.is_since_start ? `since ${moment(window.since)}, when the server started` : `since ${moment(window.since)}`);
      state.tiles[name].forEach((tile, index) => {
        const cell = cells[index] ?? (cells[index] = tileCell(list));
        setClass(cell.node, `tone-${tile.tone}`);
        cell.node.dataset.key = tile.key;
        setText(cell.label, tile.label);
        setText(cell.value, tile.value);
        setText(cell.detail, tile.detail);
        cell.detail.title = tile.detail;
      });
    },
  };
}

function tileCell(list) {
  const label = h("dt");
  const value = h("dd", { class: "value" });
  const detail = h("dd", { class: "detail" });
  const node = h("div", null, label, value, detail);
  list.append(node);
  return { node, label, value, detail };
}

function tiersPanel() {
  const body = h("div", { class: "tiers" });
  const node = h("section", { class: "panel", "aria-label": "Tiers" }, h("h2", null, "Tiers"), body);
  const rows = new Map();
  let before = null;

  function build(state) {
    rows.clear();
    body.replaceChildren();
    state.tiers.filter((tier) => tier.capacity > 0).forEach((tier, index, all) => {
      if (index > 0) {
        const down = flow("down");
        const up = flow("up");
        rows.set(`${all[index - 1].tier}-${tier.tier}`, { down, up });
        body.append(h("div", { class: "flows" }, down.node, up.node));
      }
      const row = tierRow(tier.tier, state.watermarks[tier.tier]);
      rows.set(tier.tier, row);
      body.append(row.node);
    });
  }

  return {
    node,
    update(state) {
      const names = state.tiers.filter((tier) => tier.capacity > 0).map((tier) => tier.tier);
      if (!names.every((name) => rows.has(name))) build(state);
      for (const tier of state.tiers) rows.get(tier.tier)?.update(tier, state);
      names.slice(1).forEach((lower, index) => {
        const pair = rows.get(`${names[index]}-${lower}`);
        pair.down.update(...moved(state, before, (source, target) => target === lower && isAbove(source, lower)));
        pair.up.update(...moved(state, before, (source, target) => source === lower && isAbove(target, lower)));
      });
      if (before === null || state.at !== before.at) before = state;
    },
  };
}

function isAbove(one, other) {
  return TIERS.indexOf(one) < TIERS.indexOf(other);
}

// Bytes a second since the state before, and bytes so far, over the directions that are `wanted`.
function moved(state, before, wanted) {
  const total = (of) =>
    of.transfers_by_direction
      .filter((each) => wanted(each.source, each.target))
      .reduce((sum, each) => sum + each.bytes, 0);
  const now = total(state);
  const seconds = before === null ? 0 : state.at - before.at;
  return [seconds > 0 ? (now - total(before)) / seconds : 0, now];
}

function tierRow(name, marks) {
  const share = h("b");
  const figure = h("span", { class: "figure" });
  const filled = bar([], "");
  const legend = h("p", { class: "legend" });
  const ticks = marks
    ? ["high", "low"].map((which) => {
        const tick = h("span", { class: `tick is-${which}`, title: `${which} watermark: ${Math.round(100 * marks[which])}%` });
        tick.style.left = `${100 * marks[which]}%`;
        return tick;
      })
    : [];
  const node = h(
    "div",
    { class: "tier", "data-tier": name },
    h("h3", null, TIER_NAMES[name], " ", h("span", null, TIER_WORDS[name])),
    h("p", { class: "share" }, share, figure),
    h("div", { class: "gauge" }, filled, ticks),
    legend,
  );
  return {
    node,
    update(tier, state) {
      const used = tier.capacity - tier.free;
      setText(share, `${percent(used, tier.capacity)}%`);
      setText(figure, ` ${size(used * state.block_bytes)} of ${size(tier.capacity * state.block_bytes)}`);
      const parts = [
        ["pinned", "in use", tier.pinned],
        [name, "kept", tier.valid - tier.pinned],
        ["open", "being computed", tier.open],
        ["filling", "being copied", tier.filling],
        ["quarantined", "overdue", tier.quarantined],
      ];
      fillBar(
        filled,
        parts.map(([kind, word, slots]) => ({ kind, share: slots / tier.capacity, title: `${word}: ${count(slots)} blocks` })),
        `${TIER_NAMES[name]}: ${count(used)} of ${count(tier.capacity)} blocks in use`,
      );
      const health = tier.health === "ok" ? "" : `${tier.health}: ${tier.health === "off" ? "not read" : "takes nothing new"}, `;
      const said = parts.filter(([, , slots]) => slots > 0).map(([, word, slots]) => `${count(slots)} ${word}`);
      setText(legend, `${health}${said.join(", ") || "empty"}, of ${count(tier.capacity)} blocks`);
    },
  };
}

function flow(direction) {
  const text = h("span");
  const arrow = svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: direction === "down" ? "M6 1v9M2 6l4 4 4-4" : "M6 11V2M2 6l4-4 4 4" }));
  const node = h("p", { class: `flow ${direction}` }, arrow, text);
  return {
    node,
    update(perSecond, soFar) {
      const word = direction === "down" ? "to sleep" : "waking";
      setClass(node, `flow ${direction}${perSecond > 0 ? " is-moving" : ""}`);
      setText(text, `${gigabytes(perSecond)} ${word}`);
      node.title = `${size(soFar)} so far`;
    },
  };
}

function turnsPanel() {
  const body = h("tbody");
  const table = h(
    "table",
    { class: "turns" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, "at"), h("th", { scope: "col" }, "session"), h("th", { scope: "col" }, "reused"), h("th", { scope: "col", class: "number" }, "first token"), h("th", { scope: "col" }, "why"))),
    body,
  );
  const none = empty("No turn yet", "The first one shows here as soon as it has ended.");
  const node = h("section", { class: "panel", "aria-label": "Last turns" }, h("h2", null, "Last 20 turns"), none);
  let seen = "";
  return {
    node,
    update(turns) {
      const mark = JSON.stringify([turns.length, turns[0] ?? null]);
      if (mark === seen) return;
      seen = mark;
      if (turns.length && !table.isConnected) none.replaceWith(h("div", { class: "scroll" }, table));
      body.replaceChildren(...turns.map(turnRow));
    },
  };
}

export function origins(turn) {
  const whole = Math.max(1, turn.prompt_tokens);
  const parts = TIERS.map((tier) => ({ kind: tier, share: turn.reused[tier] / whole, title: `${count(turn.reused[tier])} from ${TIER_NAMES[tier]}` }));
  parts.push({ kind: "recomputed", share: turn.recomputed / whole, title: `${count(turn.recomputed)} computed again` });
  parts.push({ kind: "computed", share: turn.computed / whole, title: `${count(turn.computed)} new` });
  const reused = TIERS.reduce((sum, tier) => sum + turn.reused[tier], 0);
  return bar(parts, `${count(reused)} of ${count(turn.prompt_tokens)} tokens reused`);
}

export function why(turn) {
  if (turn.miss !== null) return words(turn.miss);
  if (turn.woke_from !== null && turn.woke_from !== "hbm") return `woke from ${TIER_NAMES[turn.woke_from]}`;
  return turn.outcome === "stop" || turn.outcome === "length" ? "awake" : words(turn.outcome);
}

export function tone(turn) {
  if (turn.miss === null) return turn.woke_from !== null && turn.woke_from !== "hbm" ? "woken" : "awake";
  return ["new_session", "new_branch", "cache_disabled"].includes(turn.miss) ? "begun" : "lost";
}

function turnRow(turn) {
  const name = turn.number < 0 ? turn.session : h("a", { href: `#/session/${turn.number}` }, turn.session);
  return h(
    "tr",
    null,
    h("td", { class: "time" }, clock(turn.at)),
    h("td", { class: "id", title: turn.session }, name),
    h("td", { class: "origins" }, origins(turn)),
    h("td", { class: "number" }, milliseconds(turn.first_token_ms)),
    h("td", { class: `why is-${tone(turn)}` }, why(turn)),
  );
}
