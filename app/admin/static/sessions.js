// All sessions: searched, sorted and paged by the server, so that a hundred thousand feel like fifty.

import { bar, empty, failed, h, setText } from "./dom.js";
import { TIERS, TIER_NAMES, count, duration, percent } from "./format.js";
import { ask } from "./server.js";

const COLUMNS = [
  ["id", "session", "asc"],
  ["tenant", "tenant", "asc"],
  ["branches", "branches", "desc"],
  ["turns", "turns", "desc"],
  ["tokens", "tokens", "desc"],
  [null, "where its cache is", null],
  ["last_active", "last active", "desc"],
  ["returns", "back in", "asc"],
  ["priority", "priority", "asc"],
];
const NUMBERS = new Set(["branches", "turns", "tokens", "last_active", "returns", "priority"]);
const LEAST_MS = 2_000;

export function sessions(main, asked) {
  const question = { q: asked.q ?? "", sort: asked.sort ?? "last_active", order: asked.order ?? "desc", page: Number(asked.page ?? 1) };
  const search = h("input", { type: "search", id: "search", placeholder: "Part of an id, of a parent's, or of a tenant's name", autocomplete: "off", spellcheck: "false", value: question.q });
  const found = h("p", { class: "found", role: "status" });
  const body = h("tbody");
  const heads = COLUMNS.map(([sort, label, order]) => headCell(sort, label, () => choose(sort, order)));
  const table = h("table", { class: "sessions" }, h("thead", null, h("tr", null, heads.map((head) => head.node))), body);
  const place = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Sessions" }, table);
  const older = h("button", { type: "button", class: "quiet", onclick: () => turn(1) }, "Next page");
  const newer = h("button", { type: "button", class: "quiet", onclick: () => turn(-1) }, "Previous page");
  const where = h("span");
  let latest = 0;
  let snapshot = null;
  let timer = 0;
  let pages = 1;
  let at = 0;

  main.replaceChildren(
    h("section", { class: "panel" }, h("div", { class: "finder" }, h("h1", null, "Sessions"), h("label", { class: "hidden", for: "search" }, "Search sessions"), search, found), place, h("div", { class: "pager" }, newer, where, older)),
  );
  search.addEventListener("input", () => {
    question.q = search.value;
    question.page = 1;
    look();
  });
  const onKey = (event) => {
    if (event.key !== "/" || /^(INPUT|TEXTAREA)$/.test(document.activeElement?.tagName)) return;
    event.preventDefault();
    search.focus();
  };
  document.addEventListener("keydown", onKey);

  function choose(sort, order) {
    question.order = question.sort === sort ? (question.order === "asc" ? "desc" : "asc") : order;
    question.sort = sort;
    question.page = 1;
    look();
  }

  function turn(by) {
    question.page = Math.min(pages, Math.max(1, question.page + by));
    look();
    place.scrollTop = 0;
  }

  async function look() {
    const mine = ++latest;
    at = performance.now();
    remember(question);
    heads.forEach((head) => head.mark(question));
    try {
      const answer = await ask(`admin/api/sessions?${new URLSearchParams(question)}`);
      if (mine === latest) draw(answer);
    } catch (error) {
      if (mine === latest) place.replaceChildren(failed(error, look));
    }
  }

  function draw(answer) {
    pages = answer.pages;
    setText(found, answer.matched === answer.total ? `${count(answer.total)} in all` : `${count(answer.matched)} of ${count(answer.total)}`);
    setText(where, `page ${question.page} of ${count(pages)}`);
    newer.disabled = question.page <= 1;
    older.disabled = question.page >= pages;
    const now = Date.now() / 1000;
    body.replaceChildren(...answer.sessions.map((session) => line(session, now)));
    if (answer.sessions.length) place.replaceChildren(table);
    else if (answer.total && question.q) place.replaceChildren(empty("Nothing matches", "No id, parent or tenant has that in it."));
    else if (answer.total) place.replaceChildren(empty("There are not that many pages", "Go back to the first one."));
    else place.replaceChildren(empty("No session yet", "Everyone is asleep. A request with a session_id shows here once its turn has begun."));
    place.dataset.drawn = String(latest);
  }

  look();
  return {
    update(state) {
      if (snapshot === null) snapshot = state.snapshot; // what it begins with is on its way
      if (state.snapshot === snapshot) return;
      snapshot = state.snapshot;
      clearTimeout(timer);
      timer = setTimeout(look, Math.max(0, at + LEAST_MS - performance.now()));
    },
    close() {
      latest = -1;
      clearTimeout(timer);
      document.removeEventListener("keydown", onKey);
    },
  };
}

// The address holds the question, so that a reload or a link shows the same; no step in the browser's history for each key.
function remember(question) {
  history.replaceState(null, "", `#/sessions?${new URLSearchParams(question)}`);
}

function headCell(sort, label, onclick) {
  const node = h("th", { scope: "col", class: NUMBERS.has(sort) ? "number" : null }, sort === null ? label : h("button", { type: "button", onclick }, label));
  return {
    node,
    mark(question) {
      if (sort !== null && sort === question.sort) node.setAttribute("aria-sort", question.order === "asc" ? "ascending" : "descending");
      else node.removeAttribute("aria-sort");
    },
  };
}

function line(session, now) {
  return h(
    "tr",
    { class: session.is_busy ? "busy" : null },
    h("th", { scope: "row" }, h("a", { class: "id", href: `#/session/${session.number}`, title: session.id }, session.id), tags(session, now)),
    h("td", null, session.tenant || "–"),
    h("td", { class: "number" }, count(session.branches)),
    h("td", { class: "number" }, count(session.turns)),
    h("td", { class: "number" }, count(session.tokens)),
    h("td", { class: "where" }, shares(session.blocks, session.blocks_in_all)),
    h("td", { class: "number" }, session.is_busy ? "now" : `${duration(now - session.last_active_at)} ago`),
    h("td", { class: "number" }, session.returns_at === null ? "–" : session.returns_at < now ? "due" : duration(session.returns_at - now)),
    h("td", { class: "number" }, String(session.priority)),
  );
}

export function tags(session, now) {
  const said = [];
  if (session.is_salted) said.push("salted");
  if (session.pinned) said.push("pinned");
  if (session.persist !== "disk") said.push(`persist ${session.persist}`);
  if (session.keep_seconds) said.push(`keep ${duration(session.keep_seconds)}`);
  if (session.expires_at !== null) said.push(`expires in ${duration(session.expires_at - now)}`);
  if (session.parent_id !== null) said.push(`of ${session.parent_id}`);
  return said.map((text) => h("em", { title: text }, text));
}

// A bar for each tier: the share of the latest branch's blocks that have a copy there.
export function shares(blocks, whole) {
  if (!whole) return h("span", { class: "soft" }, "no whole block yet");
  return TIERS.filter((tier) => tier in blocks).map((tier) =>
    h("span", { class: "place" }, bar([{ kind: tier, share: Math.min(1, blocks[tier] / whole), title: `${count(blocks[tier])} of ${count(whole)} blocks` }], `${TIER_NAMES[tier]}: ${percent(blocks[tier], whole)}%`), `${TIER_NAMES[tier]} ${percent(blocks[tier], whole)}%`),
  );
}
