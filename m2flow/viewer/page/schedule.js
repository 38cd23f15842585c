// The schedule: what each worker did when. Zoom, brush, point, choose; follows a run that goes on.

import { el, emptyState, facts, fit, hideTip, replace, showTip } from "m2flow/dom.js";
import { compact, count, micros } from "m2flow/format.js";
import { causeSwatch, colour, kindOf, kindSwatch, meaning, ofKind } from "m2flow/palette.js";
import { draw } from "m2flow/schedule_draw.js";
import { listen } from "m2flow/schedule_input.js";
import { AXIS, GUTTER, HEAD, layout } from "m2flow/schedule_layout.js";
import { SchedulePanel } from "m2flow/schedule_panel.js";
import { VerdictBar } from "m2flow/verdict.js";

const MARGIN = 0.5; // Of the window, that is asked for beyond each of its ends.
const PATIENCE_MS = 70;
const LEAST_US = 20;
const MOST_OPEN_LANES = 6;
const LAST_STEPS = 4; // That a longer run opens on.

export class ScheduleView {
  /** @param pair the two that this is one of, or null */
  constructor(viewer, place, pair = null) {
    this.viewer = viewer;
    this.place = place;
    this.pair = pair;
    this.held = new Map();
    this.mostRunning = new Map();
    this.only = null;
    this.hover = this.selected = this.analysis = null;
    this.isFollowing = true;
    this.asked = 0;
  }

  async show(summary) {
    this.summary = summary;
    if (!summary.num_spans) {
      this.isEmpty = true;
      replace(this.place, emptyState("No spans yet", summary.state.name === "running" ? "Workers record what they do while they run; the schedule appears here as soon as one has reported." : "This run ended before a worker reported what it did."));
      return;
    }
    this.isEmpty = false;
    this.expanded = new Set();
    [this.from, this.to] = this.pair ? this.whole() : this.latest();
    this.build();
    const [what, ...rest] = this.viewer.rest;
    if (what === "step") this.toStep(Number(rest[0]));
    if (what === "at") this.zoomTo(Number(rest[0]), Number(rest[1]));
    this.relayout();
    this.verdict?.ask();
    await Promise.all([this.fetch(), this.fetchMini(), this.analyse()]);
    if (what === "line") this.showOnly({ kind: Number(rest[0]) });
  }

  async update(summary) {
    if (this.isEmpty) {
      this.summary = summary;
      return summary.num_spans ? this.show(summary) : undefined;
    }
    const wasWhole = this.isWhole;  // Of the run as it was: it has grown since.
    this.summary = summary;
    if (this.isFollowing) [this.from, this.to] = wasWhole ? this.latest() : [summary.total - (this.to - this.from), summary.total];
    this.legend();
    this.relayout();
    await Promise.all([this.fetch(), this.fetchMini(), this.analyse()]);
  }

  close() {
    hideTip();
    this.watcher?.disconnect();
    clearTimeout(this.timer);
    this.unlisten?.();
    this.verdict?.close();
    this.isClosed = true;
  }

  themed() {
    if (this.isEmpty) return;
    this.legend();
    this.panel.render();
    this.paint();
    this.paintMini();
  }

  whole() {
    if (this.pair) return this.pair.whole(this);
    const pad = Math.max(this.summary.total * 0.005, 1);
    return [-pad, this.summary.total + pad];
  }

  /** The last few steps of a run that has more; of others, all. */
  latest() {
    const { steps } = this.summary.marks;
    const [from, to] = this.whole();
    return steps.length > LAST_STEPS + 2 ? [steps.at(-LAST_STEPS)[1], to] : [from, to];
  }

  get isWhole() {
    const [from, to] = this.whole();
    return this.from <= from * 0.9 && this.to >= this.summary.total - 1 && to;
  }

  build() {
    this.canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": "Schedule. W and S zoom, A and D pan, F shows all, L the last steps, Escape clears. A table of the busy share of each lane follows." });
    this.mini = el("canvas", { class: "mini", "aria-hidden": "true" });
    this.spacer = el("div");
    this.scroll = el("div", { class: "scroll", onscroll: () => this.paint() }, this.canvas, this.spacer);
    this.legendPlace = el("div", { class: this.pair ? "legend one-line" : "legend", tabindex: this.pair ? 0 : null, role: "toolbar", "aria-label": "What the colours mean" });
    this.shares = el("table", { class: "unseen" });
    this.aside = this.pair?.aside ?? el("aside", { "aria-label": "Details", tabindex: 0 });
    this.panel = new SchedulePanel(this, this.aside);
    this.rangePlace = el("span", { class: "right", id: "range" });
    const keys = [["W", "S", "zoom"], ["A", "D", "pan"], ["F", "all"], ["L", "last steps"], ["drag", "pan"], ["Shift", "drag", "zoom to"], ["Enter", "details"], ["Esc", "clear"]];
    this.verdict = this.pair ? null : new VerdictBar(this);
    replace(this.place,
      this.verdict?.place,
      this.legendPlace,
      el("div", { class: "split" },
        el("div", { class: "chart" }, this.pair ? null : el("div", { class: "whole" }, this.mini), this.scroll, this.shares,
          el("div", { class: this.pair ? "keys short" : "keys" }, (this.pair ? [] : keys).map((row) => el("span", {}, row.slice(0, -1).map((key) => [el("kbd", {}, key), " "]), row.at(-1))), this.rangePlace)),
        this.pair ? null : this.aside));
    this.legend();
    this.panel.render();
    this.unlisten = listen(this);
    this.watcher = new ResizeObserver(() => { this.relayout(); this.paintMini(); this.soon(); });
    this.watcher.observe(this.scroll);
  }

  legend() {
    const { kinds, causes, idle } = this.summary;
    const seen = causes.map((_, at) => at).filter((at) => idle.some(([, , , by]) => by[causes[at]] > 0));
    const button = (content, only, title) => {
      const isOn = this.only !== null && this.only.kind === only.kind && this.only.cause === only.cause;
      return el("button", { type: "button", title, "aria-pressed": String(isOn), onclick: () => this.showOnly(isOn ? null : only) }, content);
    };
    replace(this.legendPlace,
      kinds.map((kind, at) => button([kindSwatch(kinds, at), kind.label, kind.line && el("code", {}, kind.line.split("/").at(-1))], { kind: at }, `${kind.line} ${kind.text}`.trim() || `spans named ${kind.label}`)),
      seen.length ? el("span", { class: "group" }, el("span", { class: "sep" }), el("span", { class: "quiet" }, "idle:"), seen.map((at) => button([causeSwatch(causes[at]), causes[at]], { cause: at }, meaning(causes[at])))) : null,
      this.pair ? null : el("span", { class: "right moves", role: "group", "aria-label": "What is shown" }, el("button", { type: "button", title: "The last steps (L)", onclick: () => this.last() }, "Last steps"), el("button", { type: "button", title: "The whole run (F)", onclick: () => this.all() }, "All")),
      this.beside());
    replace(this.shares, el("caption", {}, "Busy share of each lane"), el("tbody", {}, this.summary.lanes.map((lane) => el("tr", {}, el("th", { scope: "row" }, lane.name), el("td", {}, `${Math.round(lane.busy_share * 100)}%`)))));
  }

  /** A choice of another run to be laid beneath this one. */
  beside() {
    const { viewer } = this;
    const others = (viewer.runs ?? []).filter((run) => run.name !== viewer.run);
    if (this.pair || !others.length || !viewer.source.isLive) return null;
    return el("label", {}, el("span", { class: "unseen" }, "Beside"), el("select", { "aria-label": "Lay another run's schedule beneath", onchange: (event) => event.target.value && viewer.go("schedule", "beside", event.target.value) },
      el("option", { value: "" }, "compare with…"), others.map((run) => el("option", { value: run.name }, run.name))));
  }

  /** One line of the flow, or one cause, and nothing else; null: all. */
  showOnly(only) {
    this.only = only;
    this.legend();
    if (only === null) this.choose(null);
    else if (only.kind !== undefined) this.panel.showLine(only.kind);
    this.paint();
  }

  relayout() {
    this.width = this.scroll.clientWidth;
    this.height = this.scroll.clientHeight;
    const room = this.height - HEAD;
    if (!this.isChosen && this.height && this.summary.lanes.length <= MOST_OPEN_LANES) {
      // Few lanes: single samples are shown from the start, if there is room for them.
      const all = new Set(this.summary.lanes.flatMap((lane, at) => (lane.num_rows.life ? [at] : [])));
      this.expanded = layout(this.summary, all, 0).height <= room ? all : new Set();
    }
    this.layout = layout(this.summary, this.expanded, room);
    this.spacer.style.height = `${Math.max(0, this.layout.height + HEAD - this.height)}px`;
    this.paint();
  }

  paint() {
    if (!this.width || this.isClosed || this.painting) return;
    this.painting = requestAnimationFrame(() => {
      this.painting = 0;
      if (this.isClosed) return;
      draw(fit(this.canvas, this.width, this.height), { ...this.scene(), scroll: this.scroll.scrollTop });
      this.rangePlace.textContent = `${micros(this.to - this.from)} shown`;
      this.canvas.dataset.painted = String(Number(this.canvas.dataset.painted ?? 0) + 1);
      this.paintBrush();
    });
  }

  scene() {
    const { summary, layout: rows, held, mostRunning, from, to, width, height, only, hover, selected, analysis } = this;
    return { summary, layout: rows, held, mostRunning, from, to, width, height, only, hover, selected, analysis };
  }

  // Data

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fetch().then(() => this.viewer.lost(null), (error) => this.viewer.lost(error)), PATIENCE_MS);
  }

  fetch() {
    this.reading = this.fetchWindow();
    return this.reading;
  }

  async fetchWindow() {
    if (!this.width || this.isClosed) return;
    const wide = this.to - this.from;
    const from = Math.max(this.from - wide * MARGIN, 0), to = Math.min(this.to + wide * MARGIN, this.summary.total + 1);
    const top = this.scroll.scrollTop - 200, bottom = this.scroll.scrollTop + this.height + 200;
    const lanes = this.layout.lanes.filter((lane) => lane.kind === "lane" && lane.top < bottom && lane.top + lane.height > top).map((lane) => lane.at);
    const turn = ++this.asked;
    const pixels = Math.min(Math.ceil(((this.width - GUTTER) * (to - from)) / wide), 8000);
    const found = await this.viewer.source.window(this.viewer.run, from, to, Math.max(pixels, 64), lanes, lanes.filter((at) => this.expanded.has(at)));
    if (turn !== this.asked || this.isClosed) return;
    for (const data of found) {
      const isFile = !this.viewer.source.isLive;
      this.held.set(data.lane, { ...data, from: isFile ? 0 : Math.floor(from), to: isFile ? this.summary.total + 1 : Math.ceil(to) });
      this.mostRunning.set(data.lane, Math.max(this.mostRunning.get(data.lane) ?? 0, ...data.running));
    }
    this.paint();
  }

  async fetchMini() {
    if (this.pair) return; // The schedules are each other's context; the room is theirs.
    const width = Math.max(this.mini.clientWidth - GUTTER, 64);
    const lanes = this.summary.lanes.map((_, at) => at).slice(0, 12);
    const found = await this.viewer.source.window(this.viewer.run, 0, this.summary.total + 1, Math.min(width, 2000), lanes, []);
    this.whole_ = found.filter((data) => lanes.includes(data.lane));
    this.paintMini();
  }

  async analyse() {
    if (this.analysing) return;
    this.analysing = true;
    try {
      this.analysis = await this.viewer.source.analysis(this.viewer.run);
      this.analysisError = null;
    } catch (error) {
      this.analysisError = error;
    }
    this.analysing = false;
    if (this.isClosed) return;
    this.verdict?.render();
    if (!this.selected) this.panel.render();
    this.paint();
  }

  // The small picture of the whole run

  paintMini() {
    const { mini } = this;
    const width = mini.clientWidth, height = mini.clientHeight;
    if (!width || !height || !this.whole_ || this.isClosed) return;
    this.miniLayer ??= document.createElement("canvas");
    const context = fit(this.miniLayer, width, height);
    context.clearRect(0, 0, width, height);
    const rows = this.whole_.filter((data) => data.work.length);
    const tall = Math.max((height - 10) / Math.max(rows.length, 1), 1);
    const scale = (width - GUTTER - 8) / (this.summary.total + 1);
    rows.forEach((data, at) => {
      const { s, d, k } = data.work[0];
      for (let i = 0; i < s.length; i++) {
        context.fillStyle = ofKind(this.summary.kinds, k[i]).fill;
        context.fillRect(GUTTER + s[i] * scale, 5 + at * tall, Math.max(d[i] * scale, 0.6), Math.max(tall - 1, 1));
      }
    });
    this.paintBrush();
  }

  paintBrush() {
    const { mini } = this;
    const width = mini.clientWidth, height = mini.clientHeight;
    if (!this.miniLayer?.width || !width || !height) return;
    const context = fit(mini, width, height);
    context.clearRect(0, 0, width, height);
    context.drawImage(this.miniLayer, 0, 0, width, height);
    const scale = (width - GUTTER - 8) / (this.summary.total + 1);
    const left = GUTTER + Math.max(this.from, 0) * scale, right = GUTTER + Math.min(this.to, this.summary.total) * scale;
    context.fillStyle = colour("page");
    context.globalAlpha = 0.66;
    context.fillRect(GUTTER, 0, left - GUTTER, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = colour("accent");
    context.strokeRect(left + 0.5, 1.5, Math.max(right - left - 1, 2), height - 3);
    context.font = '11px system-ui, "Liberation Sans", sans-serif';
    context.fillStyle = colour("faint");
    context.fillText("whole run", 14, height / 2 + 4);
  }

  // Moving about

  move(from, to) {
    const [first, last] = this.whole();
    const most = (last - first) * 1.2 + 2, least = LEAST_US;
    const wide = Math.min(Math.max(to - from, least), most);
    const middle = (from + to) / 2;
    const low = first - 0.1 * (last - first) - 1, high = last + 0.1 * (last - first) + 1;
    let start = Math.max(middle - wide / 2, low);
    if (start + wide > high) start = Math.max(high - wide, low);
    this.from = start;
    this.to = start + wide;
    this.isFollowing = this.to >= this.summary.total - 1;
    this.paint();
    this.soon();
    this.pair?.moved(this);
  }

  /** Show what the other of two shows. */
  follow(from, to) {
    [this.from, this.to] = [from, to];
    this.paint();
    this.soon();
  }

  zoom(by, at = (this.from + this.to) / 2) {
    const wide = Math.max((this.to - this.from) * by, LEAST_US);
    const share = (at - this.from) / (this.to - this.from);
    this.move(at - wide * share, at + wide * (1 - share));
  }

  pan(share) {
    const by = (this.to - this.from) * share;
    this.move(this.from + by, this.to + by);
  }

  zoomTo(start, duration) {
    const pad = Math.max(duration * 0.08, LEAST_US / 2);
    this.move(start - pad, start + duration + pad);
  }

  toStep(number) {
    const step = this.summary.marks.steps.find(([at]) => at === number);
    if (step && this.pair?.common().includes(number)) this.pair.align(number, true);
    else if (step) this.zoomTo(step[1], step[2] - step[1]);
  }

  all() {
    this.move(...this.whole());
    this.isFollowing = true;
  }

  last() {
    this.move(...(this.pair ? this.whole() : this.latest()));
    this.isFollowing = true;
  }

  time(x) {
    return this.from + ((x - GUTTER) * (this.to - this.from)) / (this.width - GUTTER);
  }

  // Pointing

  /** What stands under the pointer: a bar, an idle stretch, a lane's head, or nothing. */
  find(x, y) {
    const top = y - HEAD + this.scroll.scrollTop;
    if (y < HEAD) return null;
    const lane = this.layout.lanes.find((one) => top >= one.top - 3 && top < one.top + one.height + 4);
    if (!lane || lane.kind !== "lane") return null;
    if (x < GUTTER) return { lane: lane.at, part: "head" };
    const data = this.held.get(lane.at);
    const at = this.time(x), slack = (2 * (this.to - this.from)) / (this.width - GUTTER);
    const within = ([first, tall]) => top >= first - 1 && top < first + tall + 1;
    const seek = (row, part, number) => {
      const i = row ? nearest(row, at, slack) : -1;
      return i < 0 ? null : { lane: lane.at, part, row: number, bar: bar(row, i) };
    };
    for (const [number, slot] of lane.work.entries()) {
      if (!within(slot)) continue;
      const found = seek(data?.work[number], "work", number);
      if (found) return found;
      if (data?.idle && number === 0) return seek(data.idle, "idle", 0);
    }
    if (lane.wait && within(lane.wait)) return seek(data?.wait?.[0], "wait", 0);
    for (const [number, slot] of lane.spans.entries()) if (within(slot)) return seek(data?.life?.[number], "life", number);
    if (lane.running && within(lane.running) && data?.running.length) {
      const i = Math.round(((at - data.from) / (data.to - data.from)) * (data.running.length - 1));
      return { lane: lane.at, part: "running", value: data.running[Math.min(Math.max(i, 0), data.running.length - 1)], at };
    }
    return null;
  }

  tell(event, found) {
    const { kinds, causes, names, lanes } = this.summary;
    if (found.part === "running") return showTip(event, el("b", {}, lanes[found.lane].name), `${count(found.value)} samples running at ${micros(found.at)}`);
    const { bar } = found;
    if (found.part === "idle") return showTip(event, el("b", {}, causeSwatch(causes[bar.k]), `idle: ${causes[bar.k]}`), facts([["for", micros(bar.d)], ["because", meaning(causes[bar.k])], ["stretches", bar.n > 1 ? count(bar.n) : ""]]));
    const kind = kindOf(kinds, bar.k);
    showTip(event, el("b", {}, kindSwatch(kinds, bar.k), found.part === "life" ? `sample ${bar.call}/${bar.prompt}/${bar.member}` : kind.label),
      bar.n > 1
        ? facts([["spans", `${count(bar.n)}, mostly of this kind`], ["over", micros(bar.d)], ["filled", `${Math.round(bar.f * 100)}%`], ["line", kind.line]])
        : facts([["took", micros(bar.d)], ["at", micros(bar.s)], ["span", names[bar.name]], ["line", kind.line], ["step", bar.step >= 0 ? bar.step : ""], ["version", bar.version >= 0 ? bar.version : ""], ["samples", bar.num_samples >= 0 ? count(bar.num_samples) : ""], ["tokens", bar.num_tokens >= 0 ? compact(bar.num_tokens) : ""]]));
  }

  choose(found) {
    this.selected = found;
    this.pair?.chosen(this);
    if (found) this.panel.show(found);
    else this.panel.render();
    this.paint();
  }

  /** The next bar of this kind in its lane, before or after. */
  next(direction) {
    const { selected } = this;
    if (!selected || selected.part === "idle") return;
    const row = this.held.get(selected.lane)?.[selected.part]?.[selected.row];
    if (!row) return;
    const order = direction > 0 ? [...row.s.keys()] : [...row.s.keys()].reverse();
    const i = order.find((at) => row.k[at] === selected.bar.k && (direction > 0 ? row.s[at] > selected.bar.s : row.s[at] < selected.bar.s));
    if (i === undefined) return;
    this.choose({ ...selected, bar: bar(row, i) });
    const start = row.s[i];
    if (start < this.from || start + row.d[i] > this.to) this.move(start - (this.to - this.from) / 2, start + (this.to - this.from) / 2);
  }

  /** Choose the first (or last) bar of a kind that is held, and go to it; as soon as anything is held. */
  async seek(kind, direction) {
    for (let asked = null; !this.held.size && asked !== this.reading;) await (asked = this.reading).catch(() => null);
    let best = null;
    for (const [lane, data] of this.held) {
      for (const part of ["work", "wait", "life"]) {
        (data[part] ?? []).forEach((row, number) => {
          const i = direction > 0 ? row.k.indexOf(kind) : row.k.lastIndexOf(kind);
          if (i >= 0 && (!best || (row.s[i] - best.bar.s) * direction < 0)) best = { lane, part, row: number, bar: bar(row, i) };
        });
      }
    }
    if (!best) return;
    this.choose(best);
    const half = (this.to - this.from) / 2, middle = best.bar.s + best.bar.d / 2;
    if (best.bar.s < this.from || best.bar.s + best.bar.d > this.to) this.move(middle - half, middle + half);
  }

  clickStep(at) {
    const step = this.summary.marks.steps.find(([, start, end]) => at >= start && at < end);
    if (step) this.toStep(step[0]);
  }

  toggle(at) {
    if (!this.summary.lanes[at].num_rows.life) return;
    this.isChosen = true;
    if (!this.expanded.delete(at)) this.expanded.add(at);
    this.relayout();
    this.soon();
  }

  paintRubber(first, last) {
    const context = this.canvas.getContext("2d");
    draw(fit(this.canvas, this.width, this.height), { ...this.scene(), scroll: this.scroll.scrollTop });
    context.fillStyle = colour("accent");
    context.globalAlpha = 0.15;
    context.fillRect(Math.max(Math.min(first, last), GUTTER), AXIS, Math.abs(last - first), this.height);
    context.globalAlpha = 1;
  }
}

function bar(row, i) {
  const found = {};
  for (const key of ["s", "d", "k", "n", "f", "i", "name", "call", "step", "version", "num_samples", "num_tokens", "prompt", "member"]) found[key] = row[key] === undefined ? (key === "n" || key === "f" ? 1 : -1) : row[key][i];
  return found;
}

/** The bar at a time, or the nearest one that is not further than the slack; -1: none. Bars are in order and disjoint. */
function nearest({ s, d }, at, slack) {
  let low = 0, high = s.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (s[middle] <= at) low = middle + 1;
    else high = middle;
  }
  let best = -1, distance = slack;
  for (const i of [low - 1, low]) {
    if (i < 0 || i >= s.length) continue;
    const off = at < s[i] ? s[i] - at : Math.max(at - s[i] - d[i], 0);
    if (off <= distance && (off < distance || best < 0)) { best = i; distance = off; }
  }
  return best;
}

