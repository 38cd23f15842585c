// The runs of a folder as a table: how far each is, what it came to, how fast, and which of its options differ from the others'.

import { el, emptyState, replace } from "m2flow/dom.js";
import { compact, count, moment, number, seconds } from "m2flow/format.js";

const AGAIN_MS = 2000;

export class RunsView {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
    this.words = "";
    this.isGrouped = false;
    this.sort = { key: "began", isDown: true };
  }

  show() {
    document.title = "Runs · m2flow";
    this.render();
    if (this.viewer.source.isLive) this.timer = setTimeout(() => this.again(), AGAIN_MS);
  }

  close() {
    clearTimeout(this.timer);
    this.isClosed = true;
  }

  /** Ask again: a run that begins appears, one that goes on moves. */
  async again() {
    try {
      const runs = await this.viewer.source.runs();
      this.viewer.lost(null);
      if (this.isClosed) return;
      const isNew = JSON.stringify(runs) !== JSON.stringify(this.viewer.runs);
      this.viewer.runs = runs;
      if (isNew) this.render();
    } catch (error) {
      if (!this.isClosed) this.viewer.lost(error);
    }
    if (!this.isClosed) this.timer = setTimeout(() => this.again(), AGAIN_MS);
  }

  render() {
    const { runs } = this.viewer;
    if (!runs.length) {
      replace(this.place, emptyState("No runs here yet", "A run appears here as soon as it has begun: m2flow run flows/grpo.py"));
      return;
    }
    this.differing = differing(runs);
    if (!this.rows) {
      const search = el("input", { type: "search", "aria-label": "Search runs", placeholder: "Search names, flows, options", oninput: (event) => { this.words = event.target.value.toLowerCase(); this.fill(); } });
      const group = el("button", { class: "button", type: "button", "aria-pressed": "false", title: "Runs that differ in their seed alone are one row, with mean and deviation", onclick: () => { this.isGrouped = !this.isGrouped; group.setAttribute("aria-pressed", String(this.isGrouped)); this.fill(); } }, "Group seeds");
      this.counted = el("span", { class: "quiet right", role: "status" });
      this.rows = el("div", { class: "gridplace", tabindex: 0, role: "region", "aria-label": "Runs" });
      replace(this.place, el("div", { class: "filters", role: "search" }, search, group, this.counted), el("div", { class: "page runs" }, el("section", {}, el("h2", {}, "Runs"), this.rows)));
    }
    this.fill();
  }

  columns() {
    const plain = (key, name, show, value = (run) => run[key]) => ({ key, name, show, value, isNumber: true });
    return [
      { key: "name", name: "run", value: (run) => run.name, show: (_, run) => (run.members ? el("span", {}, el("b", {}, `${run.members.length} seeds`), " ", run.members.map((one) => [el("a", { href: `#${encodeURIComponent(one.name)}/schedule`, title: one.name }, String(one.seed)), " "])) : el("a", { href: `#${encodeURIComponent(run.name)}/schedule` }, run.name)) },
      { key: "state", name: "state", value: (run) => run.state.name, show: (_, run) => el("span", { class: `badge ${run.state.name}`, title: run.state.reason }, el("span", {}, run.state.name)) },
      { key: "flow", name: "flow", value: (run) => run.flow, show: (value) => el("code", { title: value }, value.split("/").at(-1)) },
      plain("num_steps", "steps", (value) => count(value)),
      plain("reward", "reward", (value, run) => spread(value, run, "reward")),
      plain("accuracy", "accuracy", (value, run) => spread(value, run, "accuracy")),
      plain("step_s", "a step", (value) => seconds(value)),
      plain("tokens_per_s", "tokens/s", (value) => compact(value)),
      { key: "options", name: "options that differ", value: (run) => this.optionsOf(run), show: (value) => el("span", { class: "mono quiet" }, value) },
      { key: "began", name: "began", value: (run) => run.state.began_s, show: (value) => moment(value), isNumber: true },
      { key: "took", name: "took", value: (run) => (run.state.ended_s ? run.state.ended_s - run.state.began_s : null), show: (value) => (value === null ? "" : seconds(value)), isNumber: true },
    ];
  }

  optionsOf(run) {
    const own = told(run);
    return this.differing.filter((name) => own[name] !== undefined && !(this.isGrouped && name === "seed")).map((name) => `${name}=${own[name]}`).join("  ");
  }

  fill() {
    const columns = this.columns();
    const words = this.words.split(/\s+/).filter(Boolean);
    let runs = this.viewer.runs.filter((run) => words.every((word) => `${run.name} ${run.flow} ${run.state.name} ${Object.entries(told(run)).map((pair) => pair.join("=")).join(" ")}`.toLowerCase().includes(word)));
    this.counted.textContent = `${count(runs.length)} of ${count(this.viewer.runs.length)} runs`;
    if (this.isGrouped) runs = grouped(runs);
    const column = columns.find((one) => one.key === this.sort.key) ?? columns[0];
    const by = this.sort.isDown ? -1 : 1;
    runs.sort((a, b) => {
      const x = column.value(a), y = column.value(b);
      if (x === null || x === undefined) return y === null || y === undefined ? 0 : 1;
      if (y === null || y === undefined) return -1;
      return x === y ? 0 : x < y ? -by : by;
    });
    const head = (one) => el("th", { scope: "col", class: one.isNumber ? "num" : "", "aria-sort": one.key === this.sort.key ? (this.sort.isDown ? "descending" : "ascending") : null }, el("button", { type: "button", onclick: () => { this.sort = { key: one.key, isDown: one.key === this.sort.key ? !this.sort.isDown : Boolean(one.isNumber) }; this.fill(); } }, one.name, one.key === this.sort.key ? (this.sort.isDown ? " ↓" : " ↑") : ""));
    const shown = columns.filter((one) => one.key === "name" || runs.some((run) => ![null, undefined, ""].includes(one.value(run))));
    replace(this.rows, el("table", { class: "grid sortable" }, el("thead", {}, el("tr", {}, shown.map(head))), el("tbody", {}, runs.map((run) => el("tr", {}, shown.map((one) => el("td", { class: one.isNumber ? "num whole" : "" }, one.show(one.value(run), run))))))));
    if (!runs.length) this.rows.append(el("p", { class: "quiet" }, "No run has all of these words."));
  }
}

/** What a run was asked for, flat. */
const told = (run) => ({ ...Object.fromEntries(Object.entries(run.options ?? {}).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)])), ...(run.cluster ? { cluster: run.cluster } : {}), ...(run.seed === null || run.seed === undefined ? {} : { seed: String(run.seed) }) });

/** The options in which runs of one flow differ. */
function differing(runs) {
  const values = new Map();
  for (const run of runs) for (const [name, value] of Object.entries(told(run))) {
    const key = `${run.flow}\n${name}`;
    if (!values.has(key)) values.set(key, new Set());
    values.get(key).add(value);
  }
  return [...new Set([...values].filter(([, found]) => found.size > 1).map(([key]) => key.split("\n")[1]))];
}

/** Runs that differ in their seed alone, as one. */
function grouped(runs) {
  const found = new Map();
  for (const run of runs) {
    const { seed, ...rest } = told(run);
    const key = JSON.stringify([run.flow, Object.entries(rest).sort()]);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(run);
  }
  return [...found.values()].map((members) => (members.length === 1 ? members[0] : { ...members[0], members, ...Object.fromEntries(["num_steps", "reward", "accuracy", "step_s", "tokens_per_s"].map((key) => [key, mean(members.map((one) => one[key]))])) }));
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

/** A number; of several seeds with the deviation of one. */
function spread(value, run, key) {
  if (!run.members || value === null) return number(value, 3);
  const known = run.members.map((one) => one[key]).filter((one) => one !== null);
  const deviation = known.length > 1 ? Math.sqrt(known.reduce((sum, one) => sum + (one - value) ** 2, 0) / (known.length - 1)) : null;
  return deviation === null ? number(value, 3) : `${number(value, 3)} ± ${number(deviation, 2)}`;
}
