// One session: what is kept of it and where, its last turns, and what can be done with it.

import { empty, failed, h } from "./dom.js";
import { TIERS, TIER_NAMES, clock, count, duration, milliseconds, moment, words } from "./format.js";
import { origins, tone, why } from "./overview.js";
import { ask } from "./server.js";
import { shares, tags } from "./sessions.js";

const LEAST_MS = 2_000;

export function session(main, asked, { confirm, toast }) {
  const path = `admin/api/sessions/${encodeURIComponent(asked.number)}`;
  const head = h("div");
  const body = h("div");
  let snapshot = null;
  let timer = 0;
  let at = 0;
  let isOpen = true;
  let isBusy = false;
  let shown = null;

  async function look() {
    at = performance.now();
    try {
      const found = await ask(path);
      if (isOpen) draw(found);
    } catch (error) {
      if (!isOpen) return;
      if (error.status === 404) main.replaceChildren(gone());
      else if (shown === null) main.replaceChildren(failed(error, look));
    }
  }

  function draw(found) {
    shown = found;
    if (!head.isConnected) main.replaceChildren(head, body);
    // Buttons stay the elements they are while somebody may be about to press one.
    const buttons = head.querySelector(".actions") ?? actions();
    buttons.querySelector("[data-do=pin]").textContent = found.pinned ? "Unpin" : "Pin";
    head.replaceChildren(
      h("section", { class: "panel" },
        h("p", { class: "crumb" }, h("a", { href: "#/sessions" }, "Sessions"), " / session ", String(found.number)),
        h("div", { class: "title" }, h("h1", { class: "id", title: found.id }, found.id), tags(found, Date.now() / 1000), found.is_busy ? h("em", { class: "now" }, "turn running") : null),
        facts(found),
        buttons,
      ),
    );
    body.replaceChildren(branchesPanel(found), turnsPanel(found));
  }

  function actions() {
    const button = (what, label, kind) => h("button", { type: "button", class: kind, "data-do": what, onclick: () => act(what) }, label);
    return h("div", { class: "actions", role: "group", "aria-label": "What to do with it" },
      button("wake", "Wake", "primary"), button("sleep", "Sleep", ""), button("sleep-nvme", "Sleep on disk", ""), button("fork", "Fork", ""), button("pin", "Pin", ""), button("delete", "Delete", "danger"));
  }

  async function act(what) {
    if (isBusy) return;
    isBusy = true;
    try {
      const said = await ACTIONS[what]();
      if (said !== null) toast(said);
    } catch (error) {
      toast(error.message, true);
    } finally {
      isBusy = false;
    }
    if (isOpen) look();
  }

  const ACTIONS = {
    async wake() {
      const said = await ask(`${path}/wake`, "POST", { wait: true });
      return said.status === "declined" ? `Not woken: ${words(said.reason)}.` : `Awake: ${count(said.tokens)} tokens.`;
    },
    sleep: () => sleep("dram"),
    "sleep-nvme": () => sleep("nvme"),
    async fork() {
      const name = await confirm({ title: "Fork this session", text: "A new session goes on from the same histories and shares their cache.", yes: "Fork", entry: "Id of the new session (empty: one is given)" });
      if (name === null) return null;
      const fork = await ask(`${path}/fork`, "POST", name.trim() ? { session_id: name.trim() } : {});
      location.hash = `#/session/${fork.number}`;
      return `Forked to ${fork.id}.`;
    },
    async pin() {
      const found = await ask(path, "PATCH", { pinned: !shown.pinned });
      return found.pinned ? "Pinned: it is the last to go." : "No longer pinned.";
    },
    async delete() {
      const yes = await confirm({ title: "Delete this session?", text: `The history of ${shown.id} and every byte of its cache that no other session shares leave memory and disk. This cannot be taken back.`, yes: "Delete", danger: true });
      if (yes === null) return null;
      await ask(path, "DELETE");
      close(); // there is nothing to look at any more
      location.hash = "#/sessions";
      return `${shown.id} is deleted.`;
    },
  };

  async function sleep(tier) {
    const said = await ask(`${path}/sleep?tier=${tier}`, "POST");
    return said.status === "declined" ? `Not asleep: ${words(said.reason)}.` : `Asleep in ${TIER_NAMES[tier]}: ${count(said.tokens)} tokens.`;
  }

  function close() {
    isOpen = false;
    clearTimeout(timer);
  }

  look();
  return {
    update(state) {
      if (!isOpen) return;
      if (snapshot === null) snapshot = state.snapshot;
      if (state.snapshot === snapshot) return;
      snapshot = state.snapshot;
      clearTimeout(timer);
      timer = setTimeout(look, Math.max(0, at + LEAST_MS - performance.now()));
    },
    close,
  };
}

function gone() {
  return h("section", { class: "panel" }, empty("This session is not here any more", "It was deleted, has expired, or made room for others."), h("p", { class: "centred" }, h("a", { href: "#/sessions" }, "All sessions")));
}

function facts(found) {
  const now = Date.now() / 1000;
  const rows = [
    ["tenant", found.tenant || "none"],
    ["turns", count(found.turns)],
    ["tokens", count(found.tokens)],
    ["first seen", moment(found.created_at)],
    ["last active", found.is_busy ? "now" : `${duration(now - found.last_active_at)} ago`],
    ["back in", found.returns_at === null ? "not said" : found.returns_at < now ? "due" : duration(found.returns_at - now)],
    ["priority", String(found.priority)],
  ];
  return h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))), h("div", { class: "wide" }, h("dt", null, "latest branch's cache"), h("dd", { class: "where", id: "where" }, shares(found.blocks, found.blocks_in_all))));
}

function branchesPanel(found) {
  const rows = found.branches.map((branch) => {
    const { estimate } = branch;
    const said = estimate.decision === "awake" ? "awake" : `${words(estimate.decision)} ${count(estimate.blocks)} blocks`;
    const blocks = branch.blocks ?? {};
    return h("tr", null,
      h("th", { scope: "row" }, String(branch.index)),
      h("td", { class: "number" }, count(branch.turns)),
      h("td", { class: "number" }, count(branch.tokens)),
      h("td", null, TIERS.filter((tier) => blocks[tier]).map((tier) => `${count(blocks[tier])} in ${TIER_NAMES[tier]}`).join(", ") || "none"),
      h("td", { class: "number" }, estimate.decision === "awake" ? "–" : milliseconds(estimate.restore_ms)),
      h("td", { class: "number" }, estimate.decision === "awake" ? "–" : milliseconds(estimate.recompute_ms)),
      h("td", null, said));
  });
  const heads = [["branch"], ["turns", "number"], ["tokens", "number"], ["blocks"], ["to restore", "number"], ["to recompute", "number"], ["the gate would"]];
  return h("section", { class: "panel" }, h("h2", null, "Branches ", h("span", null, "with what a turn would wait for, by what was measured lately")), scrolled("Branches", heads, rows));
}

function turnsPanel(found) {
  if (!found.last_turns.length) return h("section", { class: "panel" }, h("h2", null, "Turns"), empty("No turn since the server started", "Earlier ones are remembered as history, not as a log."));
  const heads = [["turn"], ["at"], ["reused"], ["HBM", "number"], ["DRAM", "number"], ["NVMe", "number"], ["new", "number"], ["again", "number"], ["first token", "number"], ["wake", "number"], ["queue", "number"], ["why"], ["client"]];
  const rows = found.last_turns.flatMap((turn) => {
    const cells = h("tr", null,
      h("th", { scope: "row" }, `${turn.turn}${turn.branch ? ` on branch ${turn.branch}` : ""}`),
      h("td", { class: "time" }, clock(turn.at)),
      h("td", { class: "origins" }, origins(turn)),
      TIERS.map((tier) => h("td", { class: "number" }, count(turn.reused[tier]))),
      h("td", { class: "number" }, count(turn.computed)),
      h("td", { class: "number" }, count(turn.recomputed)),
      h("td", { class: "number" }, milliseconds(turn.first_token_ms)),
      h("td", { class: "number" }, turn.wake_trigger ? `${milliseconds(turn.wake_ms)}, ${turn.wake_trigger}` : "–"),
      h("td", { class: "number" }, milliseconds(turn.queue_ms)),
      h("td", { class: `why is-${tone(turn)}` }, why(turn)),
      h("td", null, turn.client));
    return turn.diverged ? [cells, divergedRow(turn, heads.length)] : [cells];
  });
  const hint = found.shows_text ? null : h("p", { class: "note" }, "Where prompts diverged is not shown as text: --admin-text always would.");
  return h("section", { class: "panel" }, h("h2", null, "Turns ", h("span", null, "newest first, since the server started")), scrolled("Turns", heads, rows), hint);
}

function divergedRow(turn, columns) {
  const { diverged } = turn;
  return h("tr", { class: "diverged" }, h("td", { colspan: String(columns) },
    h("p", null, `In message ${diverged.message_index}, at token ${turn.diverged_at}, the prompt left what had been said:`),
    h("div", null, h("span", null, "stored"), h("code", null, diverged.stored || "nothing more")),
    h("div", null, h("span", null, "received"), h("code", null, diverged.received || "nothing more"))));
}

function scrolled(label, heads, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", null, h("thead", null, h("tr", null, heads.map(([text, kind]) => h("th", { scope: "col", class: kind ?? null }, text)))), h("tbody", null, rows)));
}
