// The schedule's mouse and keys.

import { hideTip } from "m2flow/dom.js";
import { AXIS, GUTTER, HEAD } from "m2flow/schedule_layout.js";

export function listen(view) {
  const { canvas, mini } = view;
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let drag = null;
  const fingers = new Map();
  let pinch = null;
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = point(event);
    if (event.button) return;
    if (event.pointerType === "touch") fingers.set(event.pointerId, x);
    if (fingers.size === 2) {
      const [one, other] = fingers.values();
      pinch = { apart: Math.max(Math.abs(one - other), 20), at: view.time((one + other) / 2), wide: view.to - view.from };
      drag = null;
      return;
    }
    canvas.setPointerCapture(event.pointerId);
    drag = { x, y, from: view.from, to: view.to, isBrush: event.shiftKey || (y < AXIS && x > GUTTER), scroll: view.scroll.scrollTop, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = point(event);
    view.mouse = x;
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, x);
    if (pinch && fingers.size === 2) {
      const [one, other] = fingers.values();
      const wide = (pinch.wide * pinch.apart) / Math.max(Math.abs(one - other), 20);
      const share = ((one + other) / 2 - GUTTER) / (view.width - GUTTER);
      view.move(pinch.at - wide * share, pinch.at + wide * (1 - share));
      return;
    }
    if (drag) {
      drag.moved ||= Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4;
      if (!drag.moved) return;
      hideTip();
      if (drag.isBrush) view.paintRubber(drag.x, x);
      else {
        const by = ((drag.x - x) * (drag.to - drag.from)) / (view.width - GUTTER);
        view.scroll.scrollTop = drag.scroll + drag.y - y;
        view.move(drag.from + by, drag.to + by);
      }
      return;
    }
    const found = view.find(x, y);
    const isNew = JSON.stringify(found) !== JSON.stringify(view.hover);
    view.hover = found?.bar ? found : null;
    if (isNew) view.paint();
    if (found && found.part !== "head") view.tell(event, found);
    else hideTip();
    canvas.style.cursor = found ? (found.part === "running" ? "default" : "pointer") : "default";
  });
  const lift = (event) => {
    fingers.delete(event.pointerId);
    if (fingers.size < 2) pinch = null;
  };
  canvas.addEventListener("pointercancel", (event) => { lift(event); drag = null; });
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = point(event);
    lift(event);
    if (!drag) return;
    const { moved, isBrush, x: first } = drag;
    drag = null;
    if (moved && isBrush) view.move(Math.min(view.time(first), view.time(x)), Math.max(view.time(first), view.time(x)));
    if (moved) return;
    const found = view.find(x, y);
    if (found?.part === "head" || found?.part === "running") view.toggle(found.lane);
    else if (y < HEAD && y > AXIS) view.clickStep(view.time(x));
    else view.choose(found);
  });
  canvas.addEventListener("pointerleave", () => { view.hover = null; view.mouse = undefined; hideTip(); view.paint(); });
  canvas.addEventListener("dblclick", (event) => {
    const found = view.find(...point(event));
    if (found?.bar) view.zoomTo(found.bar.s, found.bar.d);
  });
  canvas.addEventListener("wheel", (event) => {
    const fits = view.layout.height + HEAD <= view.height + 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); view.pan(event.deltaX / view.width); return; }
    if (!event.ctrlKey && !fits) return;
    event.preventDefault();
    view.zoom(1.0016 ** event.deltaY, view.time(Math.max(point(event)[0], GUTTER)));
  }, { passive: false });
  const keys = (event) => isMeant(view, event) && pressed(view, event);
  document.addEventListener("keydown", keys);
  const brush = (event) => {
    const box = mini.getBoundingClientRect();
    return ((event.clientX - box.left - GUTTER) * (view.summary.total + 1)) / (box.width - GUTTER - 8);
  };
  mini.addEventListener("pointerdown", (event) => { mini.setPointerCapture(event.pointerId); mini.first = brush(event); });
  mini.addEventListener("pointermove", (event) => { if (mini.first !== undefined && Math.abs(brush(event) - mini.first) > view.summary.total / 400) view.move(Math.min(mini.first, brush(event)), Math.max(mini.first, brush(event))); });
  mini.addEventListener("pointerup", (event) => {
    if (mini.first !== undefined && Math.abs(brush(event) - mini.first) <= view.summary.total / 400) { const half = (view.to - view.from) / 2; view.move(mini.first - half, mini.first + half); }
    mini.first = undefined;
  });
  mini.addEventListener("dblclick", () => view.all());
  return () => document.removeEventListener("keydown", keys);
}

/** Keys mean the schedule wherever the focus is, but where they have a meaning of their own; of two schedules, the one that has it. */
function isMeant(view, event) {
  const { target } = event;
  if (target === view.canvas) return true;
  if (target.closest?.("input, select, textarea, [contenteditable]") || (view.pair && (target.closest?.(".pane canvas") || view !== view.pair.views?.[0]))) return false;
  return target === document.body || target.id === "view" || event.key.length === 1 || event.key === "Escape";
}

function pressed(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = view.mouse > GUTTER ? view.time(view.mouse) : undefined;
  const act = {
    w: () => view.zoom(0.7, at), s: () => view.zoom(1 / 0.7, at), a: () => view.pan(-0.2), d: () => view.pan(0.2), f: () => view.all(), l: () => view.last(),
    ArrowLeft: () => (view.selected ? view.next(-1) : view.pan(-0.2)), ArrowRight: () => (view.selected ? view.next(1) : view.pan(0.2)),
    ArrowUp: () => { view.scroll.scrollTop -= 60; }, ArrowDown: () => { view.scroll.scrollTop += 60; },
    Enter: () => view.selected && view.zoomTo(view.selected.bar.s, view.selected.bar.d), Escape: () => view.showOnly(null),
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act) return;
  event.preventDefault();
  act();
}
