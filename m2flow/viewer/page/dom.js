// Elements from plain data. Text goes in as text: nothing here takes markup.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  set(made, attributes);
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false).map(textual));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(made, attributes);
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false).map(textual));
  return made;
}

function set(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (name === "value") made.value = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
}

const textual = (child) => (child instanceof Node ? child : String(child));

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(3).filter(Boolean));
  return parent;
}

/** A page's state when there is nothing to show: a headline and what to do about it. */
export const emptyState = (title, text) => el("div", { class: "state" }, el("h2", {}, title), el("p", {}, text));
/** What went wrong and, where there is one, a way on: `[text, address]`. */
export const errorState = (title, error, onward) =>
  el("div", { class: "state", role: "alert" }, el("h2", {}, title), el("pre", {}, error.message ?? error), onward ? el("a", { class: "button", href: onward[1] }, onward[0]) : null);
export const loadingState = (text, share) =>
  el("div", { class: "state", role: "status" }, share === undefined ? el("div", { class: "spinner" }) : el("div", { class: "progress" }, el("i", { style: { width: `${Math.round(share * 100)}%` } })), el("p", {}, text));

/** A canvas of this size in CSS pixels, sharp on any screen. */
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    if (!canvas.classList.contains("mini")) Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

const tip = () => document.getElementById("tip");

export function showTip(event, ...children) {
  const box = replace(tip(), ...children);
  box.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = box;
  const x = event.clientX + 14 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 14;
  const y = event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16;
  box.style.left = `${Math.max(x, 4)}px`;
  box.style.top = `${Math.max(y, 4)}px`;
}

export function hideTip() {
  tip().hidden = true;
}

export const facts = (rows) => el("table", { class: "facts" }, el("tbody", {}, rows.filter((row) => row && row[1] !== null && row[1] !== undefined && row[1] !== "").map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))));
