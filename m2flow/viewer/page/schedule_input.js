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
  canvas.addEventListener("pointerdown", (event) => {
    const [x, y] = point(event);
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    drag = { x, y, from: view.from, to: view.to, isBrush: event.shiftKey || (y < AXIS && x > GUTTER), scroll: view.scroll.scrollTop, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = point(event);
    view.mouse = x;
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
  canvas.addEventListener("pointerup", (event) => {
    const [x, y] = point(event);
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
  canvas.addEventListener("keydown", (event) => pressed(view, event));
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
}

function pressed(view, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = view.mouse > GUTTER ? view.time(view.mouse) : undefined;
  const act = {
    w: () => view.zoom(0.7, at), s: () => view.zoom(1 / 0.7, at), a: () => view.pan(-0.2), d: () => view.pan(0.2), f: () => view.all(),
    ArrowLeft: () => (view.selected ? view.next(-1) : view.pan(-0.2)), ArrowRight: () => (view.selected ? view.next(1) : view.pan(0.2)),
    ArrowUp: () => { view.scroll.scrollTop -= 60; }, ArrowDown: () => { view.scroll.scrollTop += 60; },
    Enter: () => view.selected && view.zoomTo(view.selected.bar.s, view.selected.bar.d), Escape: () => view.showOnly(null),
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act) return;
  event.preventDefault();
  act();
}
