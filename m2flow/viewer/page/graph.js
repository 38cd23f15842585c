// The macro graph: a box for each call site, in the order of data from left to right, with where the plan put it and what it has done.

import { el, emptyState, errorState, hideTip, loadingState, replace, showTip, facts, svg } from "m2flow/dom.js";
import { compact, count, number, seconds } from "m2flow/format.js";
import { ofKind } from "m2flow/palette.js";

const WIDE = 222, TALL = 86, ACROSS = 84, DOWN = 42, LEFT = 36, TOP = 56;
const MOST_SCALE = 1.35;
const EVERY_MS = 2000;

export class GraphView {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
  }

  async show(summary) {
    this.summary = summary;
    replace(this.place, loadingState("Reading the graph"));
    await this.fetch();
  }

  async update(summary) {
    this.summary = summary;
    if (this.asked && performance.now() - this.asked < EVERY_MS) return;
    await this.fetch();
  }

  themed() {
    if (this.graph) this.render();
  }

  close() {
    hideTip();
  }

  async fetch() {
    this.asked = performance.now();
    try {
      this.graph = await this.viewer.source.graph(this.viewer.run);
    } catch (error) {
      replace(this.place, errorState("The graph can't be shown", error));
      return;
    }
    this.render();
  }

  render() {
    const { graph } = this;
    if (!graph.nodes.length) {
      replace(this.place, emptyState("No calls yet", "A call appears here when the flow has made it."));
      return;
    }
    const boxes = arrange(graph);
    const width = Math.max(...boxes.map((box) => box.x)) + WIDE + LEFT + 10, height = Math.max(...boxes.map((box) => box.y)) + TALL + 60;
    const scale = Math.min(Math.max((this.place.clientWidth - 20) / width, 1), MOST_SCALE);
    const old = this.place.querySelector(".graph");
    const scrolled = old ? [old.scrollLeft, old.scrollTop] : [0, 0];
    const place = el("div", { class: "graph", tabindex: 0, role: "region", "aria-label": "Macro graph" },
      svg("svg", { width: width * scale, height: height * scale, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Graph of ${graph.nodes.length} calls` },
        svg("defs", {}, [["data", "machinery"], ["effect", "version"]].map(([name, colour]) => svg("marker", { id: `head-${name}`, viewBox: "0 0 8 8", refX: 7.5, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0.5 8 4 0 7.5z", style: { fill: `var(--${colour})` } })))),
        svg("text", { x: LEFT, y: 26, class: "small" }, `${graph.mode ? `${graph.mode} on ${graph.cluster} · ` : ""}full lines carry samples and rewards, dashed ones weights; on a line: samples a second lately, and how many wait there`),
        graph.edges.map((edge) => this.edge(edge, boxes)),
        boxes.map((box) => this.node(box))));
    replace(this.place, place);
    [place.scrollLeft, place.scrollTop] = scrolled;
  }

  node({ node, x, y }) {
    const fill = node.kind >= 0 ? ofKind(this.summary.kinds, node.kind).fill : "var(--wait)";
    const steps = node.steps[0] === node.steps[1] ? (node.steps[0] < 0 ? "outside the loop" : `step ${node.steps[0]}`) : `${count(node.num_calls)} calls`;
    const told = node.num_samples ? `${compact(node.num_samples)} samples${node.per_s ? `, ${compact(Number(node.per_s.toPrecision(3)))}/s` : ""}` : steps;
    const open = () => this.open(node);
    const about = (event) => showTip(event, el("b", {}, node.name), facts([["line", node.line], ["source", node.text], ["unit", node.unit], ["waits for all its input", node.is_barrier ? "yes" : ""], ["calls", count(node.num_calls)], ["samples", count(node.num_samples)], ["lately", node.per_s ? `${number(node.per_s, 3)} samples/s` : ""], ["worked", node.busy_s ? seconds(node.busy_s) : ""]]));
    const clip = (text, room) => (text.length > room ? `${text.slice(0, room - 1)}…` : text);
    const end = (text, room) => (text.length > room ? `…${text.slice(1 - room)}` : text);
    return svg("g", { class: "node", transform: `translate(${x} ${y})`, tabindex: 0, role: "button", "aria-label": `${node.name}, ${node.line}, ${node.workers.join(" ")}`, onclick: open, onkeydown: (event) => event.key === "Enter" && open(), onpointermove: about, onpointerleave: hideTip },
      svg("rect", { class: "box", width: WIDE, height: TALL, rx: 7 }),
      svg("rect", { width: 5, height: TALL - 16, x: 7, y: 8, rx: 2.5, style: { fill } }),
      svg("text", { x: 22, y: 22, style: { fontWeight: 600 } }, clip(node.name, 26)),
      svg("text", { x: 22, y: 39, class: "small mono" }, end(node.line, 28)),
      svg("text", { x: 22, y: 55, class: "small" }, clip(told, 36)),
      chips(node.workers.length ? node.workers : ["controller"]),
      node.unit ? svg("text", { x: WIDE - 10, y: 22, class: "small", "text-anchor": "end" }, `@${node.unit}`) : null);
  }

  edge(edge, boxes) {
    const from = boxes[edge.source], to = boxes[edge.target];
    const name = edge.is_effect ? "effect" : "data";
    const lift = (edge.slot ?? 0) * 7;
    const x0 = from.x + WIDE, y0 = from.y + TALL / 2 - 8 + lift, x1 = to.x, y1 = to.y + TALL / 2 - 8 + (edge.slotIn ?? 0) * 7;
    const bend = Math.max((x1 - x0) / 2, 40);
    const isLong = !edge.is_effect && passes(boxes, edge);
    const low = edge.is_effect || isLong ? lane(from, to, edge, boxes) : 0;
    const path = edge.is_effect ? around(from, to, edge.track, low) : isLong ? beneath(from, to, y1, low) : `M${x0} ${y0} C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1 - 1} ${y1}`;
    const label = [edge.per_s ? `${compact(Number(edge.per_s.toPrecision(2)))}/s` : "", edge.waiting ? `${compact(edge.waiting)} wait` : ""].filter(Boolean).join(" · ");
    const about = (event) => showTip(event, el("b", {}, edge.what), facts([["from", from.node.name], ["to", to.node.name], ["over", edge.transport], ["room", edge.capacity ? `${count(edge.capacity)} samples` : ""], ["lately", edge.per_s ? `${number(edge.per_s, 3)} samples/s` : ""], ["waiting", edge.waiting ? count(edge.waiting) : ""]]));
    return svg("g", { onpointermove: about, onpointerleave: hideTip },
      svg("path", { d: path, style: { fill: "none", stroke: "transparent", strokeWidth: 12 } }),
      svg("path", { class: name, d: path, "marker-end": `url(#head-${name})` }),
      label ? svg("text", { class: "small told", x: (x0 + x1) / 2, y: isLong ? low - 4 : (y0 + y1) / 2 - 5, "text-anchor": "middle", style: edge.waiting ? { fill: "var(--warn)" } : {} }, label) : null);
  }

  open(node) {
    hideTip();
    if (node.kind >= 0) this.viewer.go("schedule", "line", node.kind);
    else this.viewer.go("schedule");
  }
}

/** Whether data goes to a box further on than the next column. */
const passes = (boxes, edge) => boxes[edge.target].x - boxes[edge.source].x > WIDE + ACROSS + 1;

/** How low a line must go to pass beneath every box on its way: a lane of its own below the lowest of them. */
function lane(from, to, edge, boxes) {
  const [left, right] = edge.is_effect ? [to.x - 45, from.x + WIDE + 35] : [from.x + WIDE, to.x];
  const ahead = edge.is_effect ? 23 + (edge.track % 5) * 5 : 17 + (edge.slot ?? 0) * 3;
  const inWay = boxes.filter((box) => box.x + WIDE > Math.min(left, right) && box.x < Math.max(left, right));
  let low = (edge.is_effect ? from.y : Math.max(from.y, to.y)) + TALL + ahead;
  for (const box of inWay.sort((a, b) => a.y - b.y)) if (low > box.y - 6 && low < box.y + TALL + ahead) low = box.y + TALL + ahead;
  return low;
}

/** Data for a box further on goes beneath those between. */
function beneath(from, to, y1, low) {
  const turn = 8, y0 = from.y + TALL / 2 + 6;
  const x0 = from.x + WIDE + 16, x1 = to.x - 30;
  return `M${from.x + WIDE} ${y0} H${x0 - turn} Q${x0} ${y0} ${x0} ${y0 + turn} V${low - turn} Q${x0} ${low} ${x0 + turn} ${low} H${x1 - turn} Q${x1} ${low} ${x1} ${low - turn} V${y1 + turn} Q${x1} ${y1} ${x1 + turn} ${y1} H${to.x - 1}`;
}

/** Weights go around the boxes: out to the right of the one, down or up to their lane, along it, and in from the left of the other. */
function around(from, to, track, low) {
  const turn = 8, spread = (track % 5) * 5;
  const x0 = from.x + WIDE + 12 + spread, y0 = from.y + TALL - 14;
  const x1 = to.x - 22 - spread, y1 = to.y + TALL - 12;
  const side = x1 < x0 ? -1 : 1, down = y1 > low ? 1 : -1;
  return `M${from.x + WIDE} ${y0} H${x0 - turn} Q${x0} ${y0} ${x0} ${y0 + turn} V${low - turn} Q${x0} ${low} ${x0 + side * turn} ${low} H${x1 - side * turn} Q${x1} ${low} ${x1} ${low + down * turn} V${y1 - down * turn} Q${x1} ${y1} ${x1 + turn} ${y1} H${to.x - 1}`;
}

function chips(workers) {
  const shown = workers.slice(0, 2);
  const rest = workers.length - shown.length;
  let x = 22;
  return [...shown, ...(rest > 0 ? [`+${rest}`] : [])].map((name) => {
    const wide = Math.min(name.length * 6.1 + 12, 150);
    const made = svg("g", {}, svg("rect", { class: "chip", x, y: TALL - 24, width: wide, height: 16, rx: 8 }), svg("text", { class: "small", x: x + wide / 2, y: TALL - 12.5, "text-anchor": "middle", style: { fontSize: "10.5px" } }, name));
    x += wide + 4;
    return made;
  });
}

/** Columns by the longest way from a call without inputs; within a column in the order of the program. */
function arrange(graph) {
  const depth = graph.nodes.map(() => 0);
  for (let round = 0; round < graph.nodes.length; round++) {
    let isDone = true;
    for (const edge of graph.edges) {
      if (edge.is_effect || edge.source === edge.target) continue;
      if (depth[edge.target] < depth[edge.source] + 1 && depth[edge.source] + 1 < graph.nodes.length) {
        depth[edge.target] = depth[edge.source] + 1;
        isDone = false;
      }
    }
    if (isDone) break;
  }
  // Each connected part of the program is a band of its own.
  const band = graph.nodes.map((_, at) => at);
  const top = (at) => (band[at] === at ? at : (band[at] = top(band[at])));
  for (const edge of graph.edges) if (!edge.is_effect) band[top(edge.target)] = top(edge.source);
  const bands = [...new Set(graph.nodes.map((_, at) => top(at)))];
  const boxes = [];
  let y = TOP;
  for (const one of bands) {
    const members = graph.nodes.map((_, at) => at).filter((at) => top(at) === one);
    const columns = new Map();
    for (const at of members) columns.set(depth[at], [...(columns.get(depth[at]) ?? []), at]);
    const most = Math.max(...[...columns.values()].map((column) => column.length));
    for (const [column, found] of columns) found.forEach((at, row) => { boxes[at] = { node: graph.nodes[at], x: LEFT + column * (WIDE + ACROSS), y: y + (row + (most - found.length) / 2) * (TALL + DOWN) }; });
    y += most * (TALL + DOWN) + 22;
  }
  graph.edges.filter((edge) => edge.is_effect).forEach((edge, at) => { edge.track = at; });
  // Lines leave and arrive in the order of where they go and come from, what passes beneath others lowest: so they don't cross at a box.
  const slots = (own, other, name) => {
    const taken = new Map();
    const data = graph.edges.filter((edge) => !edge.is_effect);
    for (const edge of data.sort((a, b) => passes(boxes, a) - passes(boxes, b) || boxes[a[other]].y - boxes[b[other]].y)) {
      edge[name] = taken.get(edge[own]) ?? 0;
      taken.set(edge[own], edge[name] + 1);
    }
  };
  slots("source", "target", "slot");
  slots("target", "source", "slotIn");
  return boxes;
}
