// How the process does: what it waits for, its disk, the gate, the model, and the settings in force.

import { failed, h } from "./dom.js";
import { count, milliseconds, percent, size, words } from "./format.js";
import { ask } from "./server.js";

const EVERY_MS = 5_000;

export function health(main) {
  let at = 0;
  let isOpen = true;
  let shown = false;
  const search = h("input", { type: "search", id: "setting", placeholder: "Part of a setting's name", autocomplete: "off" });
  let latest = null;
  search.addEventListener("input", () => latest && filter(latest.settings));
  const rows = h("tbody");

  async function look() {
    at = performance.now();
    try {
      const found = await ask("admin/api/health");
      if (!isOpen) return;
      latest = found;
      draw(found);
    } catch (error) {
      if (isOpen && !shown) main.replaceChildren(failed(error, look));
    }
  }

  const cards = h("div", { class: "cards" });
  function draw(found) {
    if (!shown) {
      main.replaceChildren(h("h1", { class: "hidden" }, "Health"), cards, h("section", { class: "panel" }, h("div", { class: "finder" }, h("h2", null, "Settings in force"), h("label", { class: "hidden", for: "setting" }, "Search settings"), search), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings" }, h("table", { class: "settings" }, h("thead", null, h("tr", null, ["setting", "value", "heading"].map((text) => h("th", { scope: "col" }, text)))), rows))));
      shown = true;
    }
    cards.replaceChildren(...[standingCard(found), lagCard(found), queuesCard(found), gateCard(found), diskCard(found), modelCard(found)].filter(Boolean));
    filter(found.settings);
  }

  function filter(settings) {
    const text = search.value.trim().toLowerCase();
    rows.replaceChildren(...settings.filter((each) => each.name.includes(text)).map((each) => h("tr", { class: each.is_default ? null : "changed" }, h("th", { scope: "row" }, h("code", null, each.name)), h("td", null, each.value, each.is_default ? null : h("em", null, "set")), h("td", { class: "soft" }, each.heading))));
  }

  look();
  return {
    update() {
      if (performance.now() - at >= EVERY_MS) look();
    },
    close() {
      isOpen = false;
    },
  };
}

function card(title, pairs, ...more) {
  return h("section", { class: "panel" }, h("h2", null, title), h("dl", { class: "pairs" }, pairs.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))), ...more);
}

function standingCard(found) {
  const why = found.nvme?.reasons ?? [];
  return card("Process", [
    ["standing", h("b", { class: found.status === "ok" ? "tone-good" : "tone-bad" }, found.status)],
    ["memory", size(found.memory_bytes)],
    ["threads", count(found.threads)],
    ["pages watching", count(found.viewers)],
  ], why.map((text) => h("p", { class: "note tone-bad" }, text)));
}

function lagCard(found) {
  const { lag } = found;
  return card("Event loop ", [
    ["lag, median", milliseconds(lag.p50_ms)],
    ["lag, p99", milliseconds(lag.p99_ms)],
    ["lag, worst", milliseconds(lag.worst_ms)],
    ["over", `${count(lag.samples)} s`],
  ]);
}

function queuesCard(found) {
  return card("What waits, or is at work", Object.entries(found.queues).map(([name, value]) => [name, count(value)]));
}

function gateCard(found) {
  const { gate } = found;
  const rate = (value) => (value > 0 ? `${count(value)} tokens/s` : "not measured");
  return card("Restore or recompute", [
    ["gate", gate.mode === "auto" ? "decides by these rates" : "off: restores always"],
    ["prefill", rate(gate.prefill_tokens_per_second)],
    ...Object.entries(gate.read_tokens_per_second).map(([tier, value]) => [`from ${tier.toUpperCase()}`, rate(value)]),
    ["turns recomputed because cheaper", count(gate.recomputed_because_cheaper)],
    ["blocks loaded", count(gate.blocks_loaded)],
  ]);
}

function diskCard(found) {
  const { disk } = found;
  if (disk === null) return card("Disk", [["kept on disk", "nothing (--nvme-bytes 0)"]]);
  const rated = found.nvme_rated_bytes_per_day;
  return card("Disk", [
    ["folder", disk.path],
    ["blocks, catalog", `${disk.health.blocks}, ${disk.health.catalog}`],
    ["this model's files", size(disk.file_bytes)],
    ["quota over all models", disk.quota_bytes ? size(disk.quota_bytes) : "none"],
    ["io", disk.io],
    ["written in 24 h", rated ? `${size(found.nvme_bytes_last_day)}, ${percent(found.nvme_bytes_last_day, rated)}% of ${size(rated)}` : size(found.nvme_bytes_last_day)],
    ["write policy", words(found.write_policy)],
    ["catalog", `${count(disk.catalog_pending)} pending, ${count(disk.catalog_faults)} faults`],
  ]);
}

function modelCard(found) {
  const { model } = found;
  return card("Model", [
    ["name", model.name],
    ["fingerprint", h("code", null, model.fingerprint)],
    ["longest context", `${count(model.max_context)} tokens`],
    ["block", `${count(model.block_tokens)} tokens, ${size(model.block_bytes)}`],
    ["K/V of a token", size(model.block_bytes / model.block_tokens)],
  ]);
}
