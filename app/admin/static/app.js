// The frame around the views: which one is shown, the stream they share, confirmations and messages.

import { failed, h, loading, setClass, setText } from "./dom.js";
import { duration } from "./format.js";
import { ask, follow } from "./server.js";
import { overview } from "./overview.js";
import { sessions } from "./sessions.js";
import { session } from "./session.js";
import { health } from "./health.js";

const VIEWS = { overview, sessions, session, health };
const STANDINGS = { live: "live", draining: "shutting down", lost: "no answer" };

const main = document.getElementById("main");
const shown = { view: null, update: null, close: null };
let latest = null;

// `#/sessions?q=a` is view `sessions` with { q: "a" }; `#/session/12` is view `session` with { number: "12" }.
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, number] = path.split("/");
  return { view: view === "" ? "overview" : view, asked: { ...Object.fromEntries(new URLSearchParams(query)), number } };
}

function show() {
  const { view, asked } = route();
  if (view === "main") return; // the link past the navigation
  const make = VIEWS[view] ?? VIEWS.overview;
  shown.close?.();
  main.replaceChildren(loading("Waking up: asking the server for its numbers."));
  setClass(document.body, `view-${VIEWS[view] ? view : "overview"}`);
  for (const link of document.querySelectorAll("nav a[data-view]")) {
    const isHere = link.dataset.view === view || (view === "session" && link.dataset.view === "sessions");
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const moved = shown.view !== null && shown.view !== view;
  shown.view = view;
  try {
    Object.assign(shown, make(main, asked, { confirm, toast }));
    if (latest !== null) shown.update?.(latest);
  } catch (error) {
    main.replaceChildren(failed(error, show));
  }
  if (moved) main.focus({ preventScroll: true });
}

function onState(state) {
  latest = state;
  setText(document.getElementById("uptime"), `up ${duration(state.uptime_seconds)}, snapshot ${state.snapshot}`);
  document.getElementById("uptime").dataset.snapshot = state.snapshot;
  shown.update?.(state);
}

function onStanding(standing) {
  const pulse = document.getElementById("pulse");
  setClass(pulse, `pulse is-${standing}`);
  setText(pulse, STANDINGS[standing]);
}

// Resolves to what was typed ("" where nothing is asked for), or to null where it was cancelled.
export function confirm({ title, text, yes, danger = false, entry = null }) {
  const dialog = document.getElementById("confirm");
  const field = document.getElementById("confirm-value");
  setText(document.getElementById("confirm-title"), title);
  setText(document.getElementById("confirm-text"), text);
  document.getElementById("confirm-entry").hidden = entry === null;
  setText(document.querySelector("#confirm-entry label"), entry ?? "");
  field.value = "";
  const button = document.getElementById("confirm-yes");
  setText(button, yes);
  setClass(button, danger ? "danger" : "primary");
  dialog.returnValue = "cancel";
  dialog.showModal();
  if (entry !== null) field.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? field.value : null), { once: true });
  });
}

export function toast(text, isError = false) {
  const note = h("p", { class: isError ? "toast failed" : "toast" }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), isError ? 8_000 : 4_000);
}

// Enter in the field of a confirmation means yes: the first button of the form would be the one that cancels.
document.getElementById("confirm-value").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  document.getElementById("confirm").close("yes");
});

document.getElementById("logout")?.addEventListener("click", async () => {
  await ask("admin/logout", "POST").catch(() => null);
  location.reload();
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

window.addEventListener("hashchange", show);
show();
follow(onState, onStanding);
