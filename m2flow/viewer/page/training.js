// Metrics over steps, a chart for each; other runs beside this one.

import uPlot from "m2flow/uPlot.js";
import { askComparison, comparedRuns, comparisonSections } from "m2flow/comparison.js";
import { el, emptyState, errorState, loadingState, replace } from "m2flow/dom.js";
import { compact, number } from "m2flow/format.js";
import { colour } from "m2flow/palette.js";

const FIRST = [/^reward$/, /accuracy|pass/, /^loss$|\/loss$/, /kl/, /entropy/, /^response_length$|\/response_length$/, /staleness/, /grad_norm/, /tokens_per_s|tokens\/s/, /efficiency/];
const HEIGHT = 190;
const EVERY_MS = 1500;

export class TrainingView {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
    this.others = new Set();
    this.charts = [];
    this.filter = "";
  }

  async show(summary) {
    this.summary = summary;
    replace(this.place, loadingState("Reading the metrics"));
    await this.fetch();
  }

  async update() {
    if (performance.now() - this.asked > EVERY_MS) await this.fetch();
  }

  tick() {
    return this.update();
  }

  themed() {
    this.render();
  }

  close() {
    this.clear();
    this.watcher?.disconnect();
    this.isClosed = true;
  }

  clear() {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
  }

  async fetch() {
    this.asked = performance.now();
    const names = [this.viewer.run, ...this.others];
    let found;
    try {
      found = await Promise.all(names.map((name) => this.viewer.source.training(name)));
    } catch (error) {
      replace(this.place, errorState("The metrics can't be shown", error));
      return;
    }
    if (this.isClosed) return;
    if (this.others.size && this.compared?.join() !== names.join()) this.compare(names);
    const isSame = JSON.stringify(found) === this.last;
    this.last = JSON.stringify(found);
    this.found = found.map((training, at) => ({ name: names[at], ...training }));
    if (!isSame) this.render();
  }

  /** What differs between this run and each that is beside it; drawn when it is there. */
  async compare(names) {
    this.compared = names;
    const [run, ...others] = names;
    this.comparisons = [];
    for (const other of others) {
      const found = await askComparison(this.viewer.source, run, other).catch((error) => ({ error }));
      if (this.isClosed || this.compared !== names) return;
      this.comparisons.push(found);
    }
    this.render();
  }

  names() {
    const all = new Set(this.found.flatMap((run) => Object.keys(run.series)));
    const rank = (name) => { const at = FIRST.findIndex((pattern) => pattern.test(name)); return (at < 0 ? FIRST.length : at) + (/^(setup|lengths)\//.test(name) ? 100 : 0); };
    return [...all].filter((name) => name.toLowerCase().includes(this.filter.toLowerCase())).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  }

  render() {
    if (!this.found) return;
    const { runs, run } = this.viewer;
    const isKept = this.place.querySelector(".charts");
    const scrolled = isKept?.scrollTop ?? 0;
    this.clear();
    if (!this.found.some((one) => Object.keys(one.series).length)) {
      replace(this.place, emptyState("No metrics yet", "They appear after the first step: what the flow logs, what updates report, and how fast it went."));
      return;
    }
    const place = el("div", { class: "charts", tabindex: 0, role: "region", "aria-label": "Metrics over steps" });
    const others = runs.filter((one) => one.name !== run);
    replace(this.place,
      el("div", { class: "filters" },
        el("label", {}, "metrics with", el("input", { type: "text", "aria-label": "Metrics with this in their name", style: { width: "140px" }, value: this.filter, placeholder: "reward", onchange: (event) => { this.filter = event.target.value; this.render(); } })),
        others.length ? el("label", {}, "beside it", el("select", { "aria-label": "Compare with a run", onchange: (event) => { if (event.target.value) this.others.add(event.target.value); this.fetch(); } }, el("option", { value: "" }, "choose a run"), others.filter((one) => !this.others.has(one.name)).map((one) => el("option", { value: one.name }, one.name)))) : null,
        [...this.others].map((name, at) => el("button", { class: "button", type: "button", title: "Leave it out", onclick: () => { this.others.delete(name); this.fetch(); } }, swatch(at + 1), ` ${name} ×`))),
      place);
    for (const found of this.others.size ? this.comparisons ?? [] : []) place.append(this.difference(found));
    for (const name of this.names()) place.append(this.card(name));
    place.scrollTop = scrolled;
    this.watcher?.disconnect();
    this.watcher = new ResizeObserver(() => this.charts.forEach((chart) => chart.setSize({ width: chart.root.parentElement.clientWidth, height: HEIGHT })));
    this.watcher.observe(place);
  }

  difference(found) {
    if (found.error) return el("section", { class: "card wide" }, el("h2", {}, "What differs"), el("p", { class: "quiet" }, found.error.message));
    const { kinds, causes } = this.summary;
    return el("section", { class: "card wide", "data-compared": found.other.name },
      el("div", { class: "compared" }, comparedRuns(found), el("a", { class: "button", href: this.viewer.link("schedule", "beside", found.other.name) }, "Schedules beside each other")),
      el("div", { class: "columns" }, comparisonSections({ ...found, metrics: [] }, kinds, causes)));
  }

  card(name) {
    const own = this.found[0].series[name];
    const last = own?.values.findLast((value) => value !== null);
    const first = own?.values.find((value) => value !== null);
    const bad = this.found[0].non_finite[name];
    const place = el("div");
    const card = el("section", { class: "card", "data-metric": name }, el("h2", {}, name, el("span", {}, first === undefined ? "" : `${number(first, 3)} to ${number(last, 3)}`, bad ? `, not finite ${bad} times` : "")), place);
    requestAnimationFrame(() => { if (!this.isClosed && place.isConnected) this.charts.push(this.chart(name, place)); });
    return card;
  }

  chart(name, place) {
    const runs = this.found.filter((run) => run.series[name]);
    const steps = [...new Set(runs.flatMap((run) => run.series[name].steps))].sort((a, b) => a - b);
    const lines = runs.map((run) => { const { steps: own, values } = run.series[name]; const at = new Map(own.map((step, i) => [step, values[i]])); return steps.map((step) => at.get(step) ?? null); });
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 }, font: '11px system-ui, "Liberation Sans", sans-serif' };
    return new uPlot({
      width: place.clientWidth, height: HEIGHT,
      scales: { x: { time: false, range: (_, low, high) => (steps.length > 1 ? ranged(low, high, [low, high]) : [steps[0] - 0.5, steps[0] + 0.5]) }, y: { range: (_, low, high) => ranged(low, high, uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true)) } },
      cursor: { points: { size: 6 }, sync: { key: "steps" } },
      hooks: { setCursor: [(chart) => { const told = place.parentElement.querySelector("h2 span"); told.dataset.whole ??= told.textContent; const at = chart.cursor.idx; told.textContent = at === null || at === undefined ? told.dataset.whole : `step ${steps[at]}${runs.length > 1 ? "" : `: ${number(lines[0][at], 4)}`}`; }] },
      legend: { show: runs.length > 1, live: true },
      axes: [{ ...axis, size: 28, values: (_, at) => at.map((step) => (Number.isInteger(step) ? step : "")) }, { ...axis, size: (_, shown) => Math.max(54, 20 + 6.2 * Math.max(0, ...(shown ?? []).map((value) => String(value).length))), values: (_, at) => at.map((value) => compact(value)) }],
      series: [{ label: "step" }, ...runs.map((run) => { const stroke = colour(`c${this.found.indexOf(run) % 8}`); return { label: run.name, stroke, width: 1.6, spanGaps: true, points: { show: steps.length < 60, size: 4, stroke, fill: stroke }, value: (_, value) => number(value, 4) || "" }; })],
    }, [steps, ...lines], place);
  }
}

/** A scale's ends; of values that are all the same but for rounding, some room about them. */
function ranged(low, high, else_) {
  if (low === null || high === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  return high - low > size * 1e-6 ? else_ : [low - (size || 1) * 0.1, high + (size || 1) * 0.1];
}

function swatch(at) {
  const made = el("i", { class: "swatch" });
  made.style.background = `var(--c${at % 8})`;
  return made;
}
