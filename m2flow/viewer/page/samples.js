// All samples, or their groups: a table of which only the rows on the screen exist, sorted and filtered here; one of them read whole.

import { el, emptyState, errorState, fit, loadingState, replace } from "m2flow/dom.js";
import { compact, count, micros, number } from "m2flow/format.js";
import { colour, ofKind } from "m2flow/palette.js";
import { GroupPage } from "m2flow/group.js";
import { sampleDetail } from "m2flow/sample_detail.js";

const ROW = 28;
const SPARE = 12;
const LEAST_LIFE = 200, MOST_LIFE = 420; // Pixels.
const RANGES = ["step", "reward", "tokens", "staleness", "wait"];
const SETS = { training: 0, evaluation: 1 };
const SOON_MS = 220;

export class SamplesView {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
    this.sort = { key: "at", isDown: false };
    this.filters = {};
    this.isGrouped = false;
    this.chosen = null;
    this.texts = new Map();
    this.words = "";
    this.matches = null;
  }

  async show(summary) {
    this.summary = summary;
    replace(this.place, loadingState("Reading the samples"));
    try {
      this.data = await this.viewer.source.samples(this.viewer.run);
    } catch (error) {
      replace(this.place, errorState("The samples can't be shown", error));
      return;
    }
    if (!this.data.call.length) {
      this.isEmpty = true;
      replace(this.place, emptyState("No samples yet", "A sample appears here when its last token has been generated."));
      return;
    }
    this.isEmpty = false;
    const [what, value] = this.viewer.rest;
    if (what === "group" && /^\d+-\d+$/.test(value ?? "")) {
      this.group_ = new GroupPage(this.viewer, this.place, this.data);
      return this.group_.show(...value.split("-").map(Number));
    }
    this.set = this.data.evaluates.some(Boolean) ? "training" : "";
    if (what === "step" && value !== undefined) this.filters.step = { least: Number(value), most: Number(value) };
    const at = this.viewer.rest.indexOf("where");
    if (at >= 0) this.parse(new URLSearchParams(this.viewer.rest[at + 1]));
    this.build();
    this.choose_();
    if (this.words) await this.search();
    if (what && /^\d+-\d+-\d+$/.test(what)) {
      const [call, prompt, member] = what.split("-").map(Number);
      await this.read(call, prompt, member);
      const { data } = this;
      const at = data.call.findIndex((_, i) => data.call[i] === call && data.prompt[i] === prompt && data.member[i] === member);
      const place = this.isGrouped ? -1 : this.order.indexOf(at);
      if (place >= 0) this.table.scrollTop = Math.max(place * ROW - 200, 0);
      this.paint();
    }
  }

  async update(summary) {
    this.summary = summary;
    if (this.isEmpty) return this.show(summary);
    if (this.asking || this.group_) return undefined;
    this.asking = true;
    try {
      this.data = await this.viewer.source.samples(this.viewer.run);
      this.choose_();
    } finally {
      this.asking = false;
    }
    return undefined;
  }

  themed() {
    if (!this.isEmpty && this.body) this.paint();
  }

  close() {
    this.watcher?.disconnect();
    clearTimeout(this.soon);
    clearTimeout(this.later);
    this.isClosed = true;
  }

  /** What is asked for, as a query: of the page's address, and of an export. */
  query() {
    const asked = new URLSearchParams();
    for (const key of RANGES) {
      const { least, most } = this.filters[key] ?? {};
      if (least !== undefined || most !== undefined) asked.set(key, `${least ?? ""}..${most ?? ""}`);
    }
    if (this.filters.finish !== undefined) asked.set("finish", this.data.finishes[this.filters.finish]);
    if (this.filters.ending !== undefined) asked.set("ending", this.data.endings[this.filters.ending]);
    if (this.data.evaluates.some(Boolean)) asked.set("set", this.set || "all");
    if (this.words) asked.set("q", this.words);
    if (this.isGrouped) asked.set("by", "group");
    if (this.sort.key !== "at" || this.sort.isDown) asked.set("sort", `${this.sort.isDown ? "-" : ""}${this.sort.key}`);
    return asked;
  }

  parse(asked) {
    for (const key of RANGES) {
      const found = /^(-?[\d.e+-]*?)\.\.(-?[\d.e+-]*)$/.exec(asked.get(key) ?? "");
      if (found) this.filters[key] = { least: found[1] === "" ? undefined : Number(found[1]), most: found[2] === "" ? undefined : Number(found[2]) };
    }
    const at = (names, name) => (names.includes(name) ? names.indexOf(name) : undefined);
    this.filters.finish = at(this.data.finishes, asked.get("finish"));
    this.filters.ending = at(this.data.endings, asked.get("ending"));
    if (asked.has("set")) this.set = asked.get("set") in SETS ? asked.get("set") : "";
    this.words = asked.get("q") ?? "";
    this.isGrouped = asked.get("by") === "group";
    const sort = asked.get("sort");
    if (sort) this.sort = { key: sort.replace(/^-/, ""), isDown: sort.startsWith("-") };
  }

  /** The address says what is shown, so that it can be sent to somebody. */
  remember() {
    const asked = this.query().toString();
    history.replaceState(null, "", this.viewer.link("samples", ...(this.chosen ? [this.chosen.join("-")] : []), ...(asked ? ["where", asked] : [])));
    if (this.exports) for (const link of this.exports.children) link.setAttribute("href", this.viewer.source.exported(this.viewer.run, link.dataset.kind, asked));
  }

  async search() {
    const asked = this.words;
    try {
      const found = asked ? await this.viewer.source.search(this.viewer.run, asked) : null;
      if (asked !== this.words || this.isClosed) return;
      this.matches = found && new Set(found.map((id) => id.join("/")));
      this.wrong.textContent = "";
    } catch (error) {
      this.wrong.textContent = error.message.split("\n")[0];
      return;
    }
    this.choose_();
  }

  columns() {
    const { data, summary } = this;
    const plain = (key, name, width, show, more = {}) => ({ key, name, width, show, value: (i) => data[key][i], ...more });
    const sample = (i) => (this.isGrouped ? `${data.call[i]}/${data.prompt[i]}` : `${data.call[i]}/${data.prompt[i]}/${data.member[i]}`);
    const all = [
      { key: "at", name: this.isGrouped ? "group" : "sample", width: globalThis.innerWidth < 640 ? 84 : 116, isLeft: true, value: (i) => i, show: (_, i) => sample(i) },
      plain("step", "step", 56, count),
      plain("reward", "reward", 84, (value) => number(value, 3), { bar: "reward" }),
      this.isGrouped ? { key: "size", name: "samples", width: 74, value: (i) => this.groups.size[i], show: count } : plain("advantage", "advantage", 84, (value) => number(value, 3)),
      plain("prompt_tokens", "prompt", 72, count),
      plain("tokens", this.isGrouped ? "mean tokens" : "tokens", 92, compact, { bar: "tokens" }),
      this.summary.has_ledger ? { key: "prompt_text", name: "prompt", width: this.textWidths()[0], isLeft: true, isText: 0, value: (i) => i } : null,
      this.summary.has_ledger ? { key: "response_text", name: this.isGrouped ? "first response" : "response", width: this.textWidths()[1], isLeft: true, isText: 1, value: (i) => i } : null,
      { key: "start", name: "span in its step", width: LEAST_LIFE, isLeft: true, isLife: true, value: (i) => data.start[i] },
      this.isGrouped ? null : plain("version", "version", 66, (value) => (value < 0 ? "" : count(value))),
      plain("staleness", "staleness", 76, count),
      plain("wait", "waited", 82, micros),
      this.isGrouped || !Object.keys(data.spans).length ? null : { key: "spans", name: "spans", width: 54, value: (i) => data.spans[i]?.length ?? 1, show: count },
      plain("updates", "updates", 68, count),
      { key: "finish", name: "finish", width: 62, isLeft: true, value: (i) => data.finish[i], show: (value) => data.finishes[value] ?? "" },
      { key: "ending", name: "ending", width: 94, isLeft: true, value: (i) => data.ending[i], show: (value) => data.endings[value] ?? "" },
      { key: "worker", name: "worker", width: 100, isLeft: true, value: (i) => data.worker[i], show: (value) => data.workers[value] ?? "" },
    ].filter(Boolean);
    if (globalThis.innerWidth < 640) all.sort((a, b) => rank(a) - rank(b)); // On a phone the texts come first.
    return this.isGrouped ? all.filter((one) => !["finish", "ending", "worker"].includes(one.key)).map((one) => (this.groups[one.key] ? { ...one, value: (i) => this.groups[one.key][i] } : one)) : all;
  }

  textWidths() {
    const wide = this.table?.clientWidth || 1200;
    return [Math.round(Math.min(Math.max(wide * 0.16, 130), 340)), Math.round(Math.min(Math.max(wide * 0.26, 180), 640))];
  }

  build() {
    const { data } = this;
    const range = (key, name, step, unit = 1) => {
      const ask = (end) => el("input", { type: "number", step, "aria-label": `${name}, ${end === "least" ? "at least" : "at most"}`, placeholder: end === "least" ? "≥" : "≤", value: this.filters[key]?.[end] === undefined ? "" : this.filters[key][end] / unit, oninput: (event) => { this.filters[key] = { ...this.filters[key], [end]: event.target.value === "" ? undefined : Number(event.target.value) * unit }; this.choose_(); } });
      return el("label", {}, name, ask("least"), ask("most"));
    };
    const pick = (key, name, values) => el("label", {}, name, el("select", { "aria-label": name, onchange: (event) => { this.filters[key] = event.target.value === "" ? undefined : Number(event.target.value); this.choose_(); } }, el("option", { value: "" }, "any"), values.map((value, at) => el("option", { value: at }, value))));
    this.counted = el("span", { class: "quiet right", role: "status" });
    this.wrong = el("span", { class: "bad", role: "alert" });
    const search = el("input", { type: "search", "aria-label": "Search the texts", placeholder: "Search prompts and responses", title: 'Words that all must be there; "a phrase"; begin*; one OR other; response : word', value: this.words, oninput: (event) => { this.words = event.target.value.trim(); clearTimeout(this.soon); this.soon = setTimeout(() => this.search(), SOON_MS); } });
    const evaluated = data.evaluates.filter(Boolean).length;
    const sets = [["training", data.call.length - evaluated], ["evaluation", evaluated], ["", data.call.length]];
    const setButtons = evaluated ? el("div", { class: "segments", role: "group", "aria-label": "Which samples" }, sets.map(([name, number_]) => el("button", { type: "button", "data-set": name, "aria-pressed": String(this.set === name), onclick: (event) => { this.set = name; for (const one of event.currentTarget.parentElement.children) one.setAttribute("aria-pressed", String(one.dataset.set === name)); this.choose_(); } }, `${name || "all"} `, el("small", {}, compact(number_))))) : null;
    this.exports = this.viewer.source.isLive && this.summary.has_ledger ? el("span", { class: "exports", role: "group", "aria-label": "Export what is selected" }, ["jsonl", "parquet"].map((kind) => el("a", { class: "button", "data-kind": kind, href: "", download: "" }, `Export ${kind === "jsonl" ? "JSONL" : "Parquet"}`))) : null;
    this.group = el("button", { class: "button", type: "button", "aria-pressed": String(this.isGrouped), onclick: () => { this.isGrouped = !this.isGrouped; this.group.setAttribute("aria-pressed", String(this.isGrouped)); this.sort = { key: "at", isDown: false }; this.choose_(); } }, "By group");
    this.head = el("div", { class: "head", role: "row" });
    this.body = el("div", { class: "body", role: "rowgroup", tabindex: 0, "aria-label": "Samples; arrow keys choose", onkeydown: (event) => this.key(event) });
    this.table = el("div", { class: "table", role: "grid", "aria-label": "Samples", onscroll: () => this.paint() }, this.head, this.body);
    this.aside = el("aside", { class: "wide", "aria-label": "Sample", tabindex: 0, hidden: true });
    replace(this.place,
      data.num_left_out ? el("div", { class: "notice" }, `The newest ${count(data.call.length)} samples are shown; ${count(data.num_left_out)} older ones are not. \`m2flow samples\` chooses among all.`) : null,
      el("div", { class: "filters", role: "search" }, setButtons, this.summary.has_ledger ? search : null, this.wrong, this.group, range("step", "step", 1), range("reward", "reward", "any"), range("tokens", "tokens", 1), range("staleness", "staleness", 1), range("wait", "waited s", "any", 1e6), pick("finish", "finish", data.finishes), pick("ending", "ending", data.endings), this.counted, this.exports),
      el("div", { class: "split" }, this.table, this.aside));
    this.watcher = new ResizeObserver(() => this.paint());
    this.watcher.observe(this.table);
  }

  /** Which rows there are, and in which order. */
  choose_() {
    const { data, filters, matches } = this;
    const number_ = data.call.length;
    const wanted = SETS[this.set];
    const found = [];
    for (let i = 0; i < number_; i++) {
      let fits = true;
      for (const key of RANGES) {
        const limit = filters[key];
        if (!limit) continue;
        const value = data[key][i];
        if (limit.least !== undefined && !(value !== null && value >= limit.least)) fits = false;
        if (limit.most !== undefined && !(value !== null && value <= limit.most)) fits = false;
      }
      for (const key of ["finish", "ending"]) if (filters[key] !== undefined && data[key][i] !== filters[key]) fits = false;
      if (fits && wanted !== undefined && data.evaluates[i] !== wanted) fits = false;
      if (fits && matches && !matches.has(this.idOf(i))) fits = false;
      if (fits) found.push(i);
    }
    this.remember();
    this.num = found.length;
    let order = found;
    if (this.isGrouped) {
      this.groups = grouped(data, found);
      order = this.groups.first;
    }
    this.shown = this.columns();
    const column = this.shown.find((one) => one.key === this.sort.key) ?? this.shown[0];
    const values = new Map();
    for (const i of order) values.set(i, column.value(i));
    const by = this.sort.isDown ? -1 : 1;
    // What has no value comes last, whichever way.
    this.order = Array.from(order).sort((a, b) => {
      const x = values.get(a), y = values.get(b);
      if (x === null || x === undefined) return y === null || y === undefined ? a - b : 1;
      if (y === null || y === undefined) return -1;
      return x === y ? a - b : x < y ? -by : by;
    });
    this.most = { tokens: this.shown.find((one) => one.key === "tokens"), reward: null };
    this.limits = {};
    for (const key of ["reward", "tokens"]) {
      const own = this.shown.find((one) => one.key === key);
      let low = 0, high = 0;
      for (const i of this.order) { const value = own.value(i); if (value > high) high = value; if (value < low) low = value; }
      this.limits[key] = [low, high];
    }
    this.counted.textContent = `${count(this.num)} of ${count(number_)} samples${this.isGrouped ? ` in ${count(this.order.length)} groups` : ""}`;
    this.header();
    this.body.style.height = `${this.order.length * ROW}px`;
    this.paint(true);
  }

  header() {
    replace(this.head, this.shown.map((column) => {
      const isOn = column.key === this.sort.key;
      return el("div", { role: "columnheader", "data-left": column.isLeft ?? null, "aria-sort": isOn ? (this.sort.isDown ? "descending" : "ascending") : null, style: { width: `${column.width}px` } }, el("button", { type: "button", onclick: () => { this.sort = { key: column.key, isDown: isOn ? !this.sort.isDown : column.key !== "at" }; this.choose_(); } }, column.name, isOn ? (this.sort.isDown ? " ↓" : " ↑") : ""));
    }));
  }

  /** Lives take the room that the other columns leave. */
  spread() {
    const span = this.shown.find((column) => column.isLife);
    const others = this.shown.reduce((sum, column) => sum + column.width, 0) - span.width;
    const width = Math.min(Math.max(this.table.clientWidth - others, LEAST_LIFE), MOST_LIFE);
    if (width === span.width) return;
    span.width = width;
    this.header();
  }

  paint(isNew) {
    if (!this.order) return;
    this.spread();
    const first = Math.max(Math.floor((this.table.scrollTop - 30) / ROW) - SPARE, 0);
    const last = Math.min(first + Math.ceil(this.table.clientHeight / ROW) + 2 * SPARE, this.order.length);
    const rows = [];
    for (let at = first; at < last; at++) rows.push(this.row(at));
    replace(this.body, rows);
    this.readTexts(this.order.slice(first, last));
    if (!this.order.length) replace(this.body, el("div", { class: "state" }, el("h2", {}, "No sample meets all of these"), el("p", {}, "Loosen a filter.")));
    this.body.dataset.rows = String(this.order.length);
    if (isNew) this.body.dataset.sorted = `${this.sort.key} ${this.sort.isDown}`;
  }

  row(at) {
    const { data } = this;
    const i = this.order[at];
    const isChosen = this.chosen && data.call[i] === this.chosen[0] && data.prompt[i] === this.chosen[1] && (this.isGrouped || data.member[i] === this.chosen[2]);
    return el("div", { class: "row", role: "row", "aria-selected": String(Boolean(isChosen)), "aria-rowindex": at + 1, style: { top: `${at * ROW}px` }, onclick: () => this.open(i) },
      this.shown.map((column) => {
        const width = { width: `${column.width}px` };
        if (column.isText !== undefined) return this.textCell(i, column, width);
        if (column.isLife) return el("div", { class: "left", style: width, role: "gridcell" }, this.life(i, column.width - 16));
        const value = column.value(i);
        const [, high] = (column.bar && this.limits[column.bar]) || [0, 0];
        return el("div", { class: `${column.isLeft ? "left" : ""}${column.bar ? " bar" : ""}`, style: width, role: "gridcell" }, column.show(value, i), column.bar && high > 0 && value > 0 ? el("i", { style: { width: `${(value / high) * (column.width - 14)}px` } }) : null);
      }));
  }

  idOf(i) {
    const { data } = this;
    return `${data.call[i]}/${data.prompt[i]}/${data.member[i]}`;
  }

  textCell(i, column, width) {
    const texts = this.texts.get(this.idOf(i));
    const text = texts?.[column.isText] ?? "";
    const shown = text.replace(/\s+/g, " ");
    // Of a prompt the end is what was asked; what is too long is cut at its beginning.
    return el("div", { class: column.isText ? "left text" : "left text end", style: width, role: "gridcell", title: text.slice(0, 300) }, texts ? (shown ? el("bdi", {}, shown) : el("span", { class: "quiet" }, "(empty)")) : "");
  }

  /** Ask for the texts of the rows on the screen that are not there yet. */
  readTexts(rows) {
    if (!this.summary.has_ledger) return;
    const { data } = this;
    const missing = rows.filter((i) => !this.texts.has(this.idOf(i))).slice(0, 200);
    clearTimeout(this.later);
    if (!missing.length) return;
    this.later = setTimeout(async () => {
      try {
        const found = await this.viewer.source.texts(this.viewer.run, missing.map((i) => [data.call[i], data.prompt[i], data.member[i]]));
        for (const i of missing) this.texts.set(this.idOf(i), found[this.idOf(i)] ?? null);
      } catch {
        return; // Without texts the table has all else.
      }
      if (!this.isClosed) this.paint();
    }, 60);
  }

  /** A sample's span beside its step: admitted to its last token, scored, trained on. */
  life(i, width) {
    const { data, summary } = this;
    const canvas = el("canvas", { "aria-hidden": "true" });
    const members = this.isGrouped ? this.groups.members.get(i) : [i];
    const height = 20;
    const context = fit(canvas, width, height);
    const step = summary.marks.steps.find(([number_]) => number_ === data.step[i]);
    const starts = members.map((one) => data.start[one]).filter((one) => one !== null);
    if (!starts.length) return canvas;
    for (const one of members) for (const [start] of data.spans[one] ?? []) starts.push(start);
    const from = Math.min(...starts, step ? step[1] : Infinity);
    const to = Math.max(step ? step[2] : 0, ...members.map((one) => Math.max(data.trained[one] ?? 0, data.end[one] ?? 0)));
    const x = (us) => ((us - from) / (to - from || 1)) * (width - 4) + 2;
    const tall = Math.max(Math.min((height - 6) / members.length, 8), 0.8);
    const kinds = summary.kinds;
    const kind = kinds.findIndex((one) => one.group === "call" && /generate/.test(one.label));
    context.strokeStyle = colour("line");
    context.strokeRect(0.5, 2.5, width - 1, height - 5);
    members.forEach((one, at) => {
      const top = 3 + at * ((height - 6) / members.length) + (members.length === 1 ? 3 : 0);
      if (data.start[one] === null) return;
      // A bar for each span, in the colour of the version that it began with; where one was cut short, a mark.
      const spans = data.spans[one] ?? [[data.start[one], data.end[one], data.worker[one], data.version[one]]];
      spans.forEach(([start, end, , version], number) => {
        context.fillStyle = version < 0 ? ofKind(kinds, Math.max(kind, 0)).fill : colour(`c${version % 8}`);
        context.fillRect(x(start), top, Math.max(x(end) - x(start), 1.5), tall);
        context.fillStyle = colour("bad");
        if (number + 1 < spans.length) context.fillRect(x(end) - 1, top - 2, 2, tall + 4);
      });
      if (data.trained[one] !== null) {
        context.fillStyle = colour("wait");
        context.fillRect(x(data.end[one]), top + tall / 2 - 0.5, Math.max(x(data.trained[one]) - x(data.end[one]), 0), 1);
        context.fillStyle = colour("accent");
        context.fillRect(x(data.trained[one]) - 1, top, 2, tall);
      }
      if (data.scored[one] !== null) {
        context.fillStyle = colour("good");
        context.fillRect(x(data.scored[one]) - 1, top, 2, tall);
      }
    });
    return canvas;
  }

  open(i) {
    const { data } = this;
    return this.read(data.call[i], data.prompt[i], data.member[i]);
  }

  async read(call, prompt, member) {
    this.chosen = [call, prompt, member];
    this.remember();
    this.aside.hidden = false;
    this.paint();
    const asked = this.chosen;
    try {
      const page = await this.viewer.source.sample(this.viewer.run, call, prompt, member);
      if (asked === this.chosen) replace(this.aside, sampleDetail(page, { row: this.rowOf(call, prompt, member), data: this.data, onclose: () => this.shut(), schedule: (at, wide) => this.viewer.go("schedule", "at", at, wide), group: this.viewer.link("samples", "group", `${call}-${prompt}`) }));
    } catch (error) {
      if (asked === this.chosen) replace(this.aside, el("section", {}, el("h2", {}, `Sample ${call}/${prompt}/${member}`), el("p", { class: "quiet" }, error.message)));
    }
  }

  rowOf(call, prompt, member) {
    const { data } = this;
    return data.call.findIndex((_, i) => data.call[i] === call && data.prompt[i] === prompt && data.member[i] === member);
  }

  shut() {
    this.chosen = null;
    this.aside.hidden = true;
    this.remember();
    this.paint();
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.shut();
    if (!by || !this.order.length) return;
    event.preventDefault();
    const { data, chosen } = this;
    const at = chosen ? this.order.findIndex((i) => data.call[i] === chosen[0] && data.prompt[i] === chosen[1] && (this.isGrouped || data.member[i] === chosen[2])) : -1;
    const next = Math.min(Math.max(at + by, 0), this.order.length - 1);
    const top = next * ROW;
    if (top < this.table.scrollTop) this.table.scrollTop = top;
    if (top + 2 * ROW + 30 > this.table.scrollTop + this.table.clientHeight) this.table.scrollTop = top + 2 * ROW + 30 - this.table.clientHeight;
    this.open(this.order[next]);
  }
}

const rank = ({ key }) => { const at = ["at", "reward", "response_text", "prompt_text"].indexOf(key); return at < 0 ? 9 : at; };

/** Groups by their first sample: means over those that are shown. */
function grouped(data, members) {
  const found = new Map();
  for (const i of members) {
    const key = `${data.call[i]}/${data.prompt[i]}`;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(i);
  }
  const result = { first: [], members: new Map(), size: [], reward: [], tokens: [], staleness: [], wait: [], updates: [], start: [] };
  for (const own of found.values()) {
    const i = own[0];
    result.first.push(i);
    result.members.set(i, own);
    result.size[i] = own.length;
    for (const key of ["reward", "tokens", "staleness", "wait", "updates"]) {
      const known = own.map((one) => data[key][one]).filter((value) => value !== null);
      result[key][i] = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    }
    const starts = own.map((one) => data.start[one]).filter((value) => value !== null);
    result.start[i] = starts.length ? Math.min(...starts) : null;
  }
  return result;
}
