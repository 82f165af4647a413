// Fetches what changes once a second and puts in what differs: bars glide, selections and scroll positions stay.
"use strict";

const EVERY_MS = 1000;
const LOST_MS = 5000;
const live = document.getElementById("live");
const source = "/admin/live?page=" + encodeURIComponent(live.dataset.page);

function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((node, index) => (index < before.length ? morph(before[index], node) : old.append(node)));
  before.slice(after.length).forEach((node) => node.remove());
}

async function refresh() {
  const response = await fetch(source, { signal: AbortSignal.timeout(LOST_MS) });
  if (response.status === 401) location.reload(); // the cookie's time is over: ask again
  if (!response.ok) throw new Error(response.status);
  const text = await response.text();
  morphChildren(live, new DOMParser().parseFromString("<main>" + text + "</main>", "text/html").body.firstChild);
}

async function loop() {
  let pause = EVERY_MS;
  if (!document.hidden) {
    try {
      await refresh();
    } catch {
      pause = LOST_MS;
      const pulse = document.getElementById("pulse");
      pulse.classList.add("lost");
      pulse.textContent = "no answer";
    }
  }
  setTimeout(loop, pause);
}

setTimeout(loop, EVERY_MS);
