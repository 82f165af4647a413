// Elements made of values: whatever comes from the server ends in a text node or an attribute, never in markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function h(tag, props, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, text) {
  if (node.className !== text) node.className = text;
}

// Parts side by side: [{ kind, share, title }], shares of the whole bar.
export function bar(parts, label) {
  const node = h("span", { class: "bar", role: "img", "aria-label": label });
  fillBar(node, parts, label);
  return node;
}

export function fillBar(node, parts, label) {
  node.setAttribute("aria-label", label);
  while (node.children.length > parts.length) node.lastChild.remove();
  parts.forEach((part, index) => {
    const piece = node.children[index] ?? node.appendChild(h("i"));
    setClass(piece, `is-${part.kind}`);
    piece.style.width = `${(100 * part.share).toFixed(2)}%`;
    piece.title = part.title ?? "";
  });
}

// What a view shows while it waits, where there is nothing, and where something went wrong.
export function loading(text) {
  return h("p", { class: "loading", role: "status" }, text);
}

export function empty(title, text) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), h("p", null, text));
}

export function failed(error, again) {
  const button = again ? h("button", { type: "button", onclick: again }, "Try again") : null;
  return h("div", { class: "empty failed", role: "alert" }, h("p", { class: "empty-title" }, "That did not work"), h("p", null, error.message), button);
}
