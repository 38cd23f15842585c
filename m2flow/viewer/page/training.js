// Metrics in sections, a chart for each; over steps, time or tokens; distributions as bands; a warm start's curve; other runs beside this one.

import uPlot from "m2flow/uPlot.js";
import { askComparison, comparedRuns, comparisonSections } from "m2flow/comparison.js";
import { el, emptyState, errorState, loadingState, replace } from "m2flow/dom.js";
import { compact, count, number, seconds } from "m2flow/format.js";
import { colour } from "m2flow/palette.js";

const SECTIONS = { learning: "is it learning", stability: "does it stay in bounds", mismatch: "do trainer and rollout agree", lengths: "how long responses are, and which are trained on", speed: "how fast steps are", other: "all else that was logged" };
const FIRST = [/^reward$/, /accuracy|pass/, /^reward_std/, /^loss$|\/loss$/, /^grad_norm/, /kl/, /entropy/, /^rollout_diff\/mean/, /^rollout_diff/, /effective_sample_share$/, /ratio_p/, /clipped$/, /^response_length$/, /staleness/, /tokens_per_s/, /efficiency/];
const BANDS = { reward: "learning", advantage: "learning", "response tokens": "lengths" };
const AXES = { step: "steps", time: "time", tokens: "tokens trained on" };
const SMOOTH = [0, 3, 10, 30];
const HEIGHT = 180;
const EVERY_MS = 1500;

export class TrainingView {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
    this.others = new Set();
    this.charts = [];
    this.filter = "";
    this.axis = "step";
    this.smooth = 0;
    this.isLog = false;
  }

  async show(summary) {
    this.summary = summary;
    const at = this.viewer.rest.indexOf("as");
    if (at >= 0) {
      const asked = new URLSearchParams(this.viewer.rest[at + 1]);
      if (asked.get("axis") in AXES) this.axis = asked.get("axis");
      if (SMOOTH.includes(Number(asked.get("smooth")))) this.smooth = Number(asked.get("smooth"));
      this.isLog = asked.get("log") === "1";
      this.filter = asked.get("with") ?? "";
    }
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

  remember() {
    const asked = new URLSearchParams();
    if (this.axis !== "step") asked.set("axis", this.axis);
    if (this.smooth) asked.set("smooth", this.smooth);
    if (this.isLog) asked.set("log", "1");
    if (this.filter) asked.set("with", this.filter);
    history.replaceState(null, "", this.viewer.link("training", ...(asked.size ? ["as", asked.toString()] : [])));
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
    const text = JSON.stringify(found);
    const isSame = text === this.text;
    this.text = text;
    this.found = found.map((one, at) => ({ name: names[at], ...one }));
    if (!isSame || !this.place.querySelector(".filters")) this.render();
  }

  /** What differs between this run and each that is beside it; drawn when it is there. */
  async compare(names) {
    this.compared = names;
    const [run, ...others] = names;
    this.comparisons = [];
    for (const other of others) {
      const found = await askComparison(this.viewer.source, run, other).catch((error) => ({ other: { name: other }, error }));
      if (this.isClosed || this.compared !== names) return;
      this.comparisons.push(found);
    }
    this.render();
  }

  names() {
    const all = [...new Set(this.found.flatMap((run) => Object.keys(run.series)))].filter((name) => name.toLowerCase().includes(this.filter.toLowerCase()));
    const rank = (name) => { const at = FIRST.findIndex((pattern) => pattern.test(name)); return at < 0 ? FIRST.length : at; };
    return all.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  }

  about(name) {
    return this.found.find((run) => run.about?.[name])?.about[name] ?? { section: "other", means: "", healthy: "", low: null, high: null };
  }

  controls() {
    const { runs, run } = this.viewer;
    const others = this.viewer.source.isLive ? runs.filter((one) => one.name !== run) : [];
    const changed = (act) => () => { act(); this.remember(); this.render(); };
    const segments = (label, choices, chosen, act) => el("div", { class: "segments", role: "group", "aria-label": label }, choices.map(([value, name]) => el("button", { type: "button", "aria-pressed": String(value === chosen), onclick: changed(() => act(value)) }, name)));
    return el("div", { class: "filters" },
      segments("Axis", Object.entries(AXES), this.axis, (value) => { this.axis = value; }),
      el("label", {}, "smooth", el("select", { "aria-label": "Smooth over steps", onchange: (event) => changed(() => { this.smooth = Number(event.target.value); })() }, SMOOTH.map((value) => el("option", { value, selected: value === this.smooth }, value ? `${value} steps` : "no")))),
      el("label", {}, el("input", { type: "checkbox", checked: this.isLog, onchange: changed(() => { this.isLog = !this.isLog; }) }), "log scale"),
      el("label", {}, "metrics with", el("input", { type: "text", "aria-label": "Metrics with this in their name", style: { width: "120px" }, value: this.filter, placeholder: "reward", onchange: (event) => changed(() => { this.filter = event.target.value; })() })),
      others.length ? el("label", {}, "beside it", el("select", { "aria-label": "Compare with a run", onchange: (event) => { if (event.target.value) this.others.add(event.target.value); this.fetch(); } }, el("option", { value: "" }, "choose a run"), others.filter((one) => !this.others.has(one.name)).map((one) => el("option", { value: one.name }, one.name)))) : null,
      [...this.others].map((name, at) => el("button", { class: "button", type: "button", title: "Leave it out", onclick: () => { this.others.delete(name); this.fetch(); } }, swatch(at + 1), ` ${name} ×`)));
  }

  render() {
    if (!this.found) return;
    this.clear();
    const [own] = this.found;
    const names = this.names();
    if (!names.length && !this.filter && !own.setup && !Object.keys(own.bands ?? {}).length) {
      replace(this.place, this.controls(), emptyState("No metrics yet", "They appear with the first update."));
      return;
    }
    const scrolled = this.place.querySelector(".training")?.scrollTop ?? 0;
    const page = el("div", { class: "training", tabindex: 0, role: "region", "aria-label": "Metrics" });
    replace(this.place, this.controls(), page);
    const grid = (...cards) => el("div", { class: "charts" }, cards);
    if (own.setup && !this.filter) page.append(el("h2", {}, "before the loop"), grid(this.setup(own.setup)));
    for (const found of this.others.size ? this.comparisons ?? [] : []) page.append(grid(this.difference(found)));
    for (const [section, question] of Object.entries(SECTIONS)) {
      const mine = names.filter((name) => this.about(name).section === section && !(own.setup && name.startsWith("setup/")));
      const bands = Object.keys(BANDS).filter((name) => BANDS[name] === section && own.bands?.[name] && name.includes(this.filter));
      if (!mine.length && !bands.length) continue;
      const cards = [...mine.map((name) => this.card(name))];
      cards.splice(Math.min(1, cards.length), 0, ...bands.map((name) => this.bandCard(name, own.bands[name])));
      if (section === "mismatch") this.mismatch(mine, cards);
      page.append(el("h2", {}, section, el("small", {}, question)), grid(cards));
    }
    if (!names.length && this.filter) page.append(emptyState("No metric has this in its name", "Loosen the filter."));
    page.scrollTop = scrolled;
    this.watcher?.disconnect();
    this.watcher = new ResizeObserver(() => this.charts.forEach((chart) => chart.setSize({ width: chart.root.parentElement.clientWidth, height: HEIGHT })));
    this.watcher.observe(page);
  }

  /** A warm start: how far it is, and its loss. */
  setup(setup) {
    const place = el("div");
    const isOver = setup.left_s === 0;
    const far = setup.most_steps ? `update ${count(setup.num_steps)} of ${count(setup.most_steps)}` : `update ${count(setup.num_steps)}`;
    const points = setup.loss.map((loss, at) => [setup.at_s[at], loss]).filter(([, loss]) => loss !== null);
    if (points.length > 1) this.later(place, () => this.plot(place, { x: points.map(([at]) => at), lines: [{ label: "loss", values: points.map(([, loss]) => loss), stroke: colour("c0") }], xs: (at) => seconds(at), tell: (at) => `${seconds(points[at][0])}: ${number(points[at][1], 4)}` }));
    return el("section", { class: "card wide", "data-metric": "setup" },
      el("h2", {}, `${setup.label}`, el("code", { class: "quiet" }, setup.line), el("span", {}, points.length ? `loss ${number(points[0][1], 3)} to ${number(points.at(-1)[1], 3)}` : "")),
      el("div", { class: "setup", role: "status" }, el("b", {}, far), setup.most_steps ? el("div", { class: "progress" }, el("i", { style: { width: `${Math.min(setup.num_steps / setup.most_steps, 1) * 100}%` } })) : null, el("span", { class: "quiet" }, isOver ? `done in ${seconds(setup.at_s.at(-1))}` : setup.left_s === null ? "" : `${seconds(setup.left_s)} left`)),
      place);
  }

  difference(found) {
    if (found.error) return el("section", { class: "card wide" }, el("h2", {}, "What differs"), el("p", { class: "quiet" }, found.error.message));
    const { kinds, causes } = this.summary;
    return el("section", { class: "card wide", "data-compared": found.other.name },
      el("div", { class: "compared" }, comparedRuns(found), el("a", { class: "button", href: this.viewer.link("schedule", "beside", found.other.name) }, "Schedules beside each other")),
      el("div", { class: "columns" }, comparisonSections({ ...found, metrics: [] }, kinds, causes)));
  }

  card(name) {
    const [own] = this.found;
    const series = own.series[name];
    const last = series?.values.findLast((value) => value !== null);
    const first = series?.values.find((value) => value !== null);
    const bad = own.non_finite[name];
    const about = this.about(name);
    const isOff = last !== undefined && ((about.low !== null && about.low !== undefined && last < about.low) || (about.high !== null && about.high !== undefined && last > about.high));
    const place = el("div");
    this.later(place, () => this.chart(name, place));
    return el("section", { class: "card", "data-metric": name },
      el("h2", {}, name, el("span", { class: isOff ? "off" : "" }, first === undefined ? "" : `${number(first, 3)} to ${number(last, 3)}`, bad ? `, not finite ${bad} times` : "")),
      place,
      about.means || about.healthy ? el("p", { class: "means" }, about.means, about.healthy ? [about.means ? ". Healthy: " : "Healthy: ", el("b", {}, about.healthy)] : null) : null);
  }

  /** Of updates with a correction: the ratio's quantiles as one band, and the reward beside what was clipped. */
  mismatch(names, cards) {
    const { series } = this.found[0];
    const [low, middle, high] = ["p01", "p50", "p99"].map((key) => series[`rollout_ratio_${key}`]);
    if (low && middle && high) {
      const quantiles = { least: low.values, p10: low.values, p25: middle.values, median: middle.values, p75: middle.values, p90: high.values, most: high.values };
      cards.unshift(this.bandCard("p_trainer / p_rollout", { steps: middle.steps, quantiles }, "Median over tokens, and a band from 1% to 99%. Healthy: near 1, within 0.5 to 2"));
    }
    const at = names.indexOf("correction_clipped");
    if (at >= 0 && series.reward) cards.splice(cards.findIndex((card) => card.dataset.metric === "correction_clipped") + 1, 0, this.card("reward"));
  }

  bandCard(name, bands, means = "Median, and bands from 25% to 75%, 10% to 90% and least to most over the samples of a step, evaluations apart") {
    const place = el("div");
    const median = bands.quantiles.median;
    this.later(place, () => {
      const { x, xs } = this.positions(this.found[0], bands.steps);
      const c = name === "reward" ? "c2" : name === "advantage" ? "c7" : "c0";
      const lines = ["least", "p10", "p25", "median", "p75", "p90", "most"].map((key) => ({ label: key, values: smoothed(bands.quantiles[key], this.smooth), stroke: key === "median" ? colour(c) : "transparent" }));
      const shade = (share) => `${colour(c)}${Math.round(share * 255).toString(16).padStart(2, "0")}`;
      const tell = (at) => `step ${bands.steps[at]}: ${["p10", "median", "p90"].map((key) => `${key} ${number(bands.quantiles[key][at], 3)}`).join(", ")}`;
      return this.plot(place, { x, xs, lines, tell, bands: [{ series: [7, 1], fill: shade(0.1) }, { series: [6, 2], fill: shade(0.16) }, { series: [5, 3], fill: shade(0.26) }] });
    });
    return el("section", { class: "card", "data-metric": `${name} quantiles` },
      el("h2", {}, name in BANDS ? `${name}, of samples` : name, el("span", {}, `median ${number(median[0], 3)} to ${number(median.at(-1), 3)}`)), place,
      el("p", { class: "means" }, means));
  }

  later(place, make) {
    requestAnimationFrame(() => { if (!this.isClosed && place.isConnected) this.charts.push(make()); });
  }

  /** Where the steps of a run stand on the axis: by their number, the time or the tokens at their end. */
  positions(run, steps) {
    if (this.axis === "step") return { x: steps, xs: (at) => (Number.isInteger(at) ? String(at) : "") };
    const of = this.axis === "time" ? run.time_s : run.tokens;
    const known = new Map(of.steps.map((step, i) => [step, of.values[i]]));
    let last = 0;
    const x = steps.map((step) => (last = Math.max(known.get(step) ?? last, last)));
    return { x, xs: this.axis === "time" ? (at) => seconds(at) : (at) => compact(at) };
  }

  chart(name, place) {
    const runs = this.found.filter((run) => run.series[name]);
    const placed = runs.map((run) => { const { steps, values } = run.series[name]; const { x, xs } = this.positions(run, steps); return { run, x, xs, steps, values }; });
    const x = [...new Set(placed.flatMap((one) => one.x))].sort((a, b) => a - b);
    const lines = placed.flatMap(({ run, x: own, values }) => {
      const at = new Map(own.map((where, i) => [where, values[i]]));
      const raw = x.map((where) => at.get(where) ?? null);
      const stroke = colour(`c${this.found.indexOf(run) % 8}`);
      if (!this.smooth) return [{ label: run.name, values: raw, stroke }];
      return [{ label: run.name, values: smoothed(raw, this.smooth), stroke }, { label: "", values: raw, stroke: `${stroke}44`, isFaint: true }];
    });
    const { low, high } = this.about(name);
    const [{ steps }] = placed;
    const tell = (at) => `${this.axis === "step" ? `step ${x[at]}` : placed.length === 1 ? `step ${steps[at]}, ${placed[0].xs(x[at])}` : placed[0].xs(x[at])}${runs.length > 1 ? "" : `: ${number(lines[0].values[at], 4)}`}`;
    return this.plot(place, { x, xs: placed[0].xs, lines, tell, hasLegend: runs.length > 1, limits: [low, high].filter((one) => one !== null && one !== undefined) });
  }

  plot(place, { x, xs, lines, tell, bands = [], hasLegend = false, limits = [] }) {
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 }, font: '11px system-ui, "Liberation Sans", sans-serif' };
    const isLog = this.isLog && lines.every(({ values }) => values.every((value) => value === null || value > 0));
    const warn = colour("warn");
    const drawLimits = (chart) => {
      const { ctx, bbox } = chart;
      ctx.save();
      ctx.strokeStyle = warn;
      ctx.setLineDash([5, 4]);
      for (const limit of limits) {
        const { min, max } = chart.scales.y;
        if (limit < min || limit > max) continue;
        const y = Math.round(chart.valToPos(limit, "y", true)) + 0.5;
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
      }
      ctx.restore();
    };
    return new uPlot({
      width: place.clientWidth, height: HEIGHT, bands,
      scales: { x: { time: false, range: (_, low, high) => (x.length > 1 ? ranged(low, high, [low, high]) : [x[0] - 0.5, x[0] + 0.5]) }, y: isLog ? { distr: 3 } : { range: (_, low, high) => ranged(low, high, uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true)) } },
      cursor: { points: { size: 6 }, sync: { key: this.axis } },
      hooks: { draw: [drawLimits], setCursor: [(chart) => { const told = place.parentElement?.querySelector("h2 span"); if (!told) return; told.dataset.whole ??= told.textContent; const at = chart.cursor.idx; told.textContent = at === null || at === undefined ? told.dataset.whole : tell(at); }] },
      legend: { show: hasLegend, live: true },
      axes: [{ ...axis, size: 28, space: 64, values: (_, at) => at.map(xs) }, { ...axis, size: (_, shown) => Math.max(54, 20 + 6.2 * Math.max(0, ...(shown ?? []).map((value) => String(value).length))), values: (_, at) => at.map((value) => (value === null ? "" : compact(value))) }],
      series: [{ label: this.axis }, ...lines.map(({ label, stroke, isFaint }) => ({ label, stroke, width: isFaint ? 1 : 1.6, spanGaps: true, points: { show: !isFaint && !bands.length && x.length < 60, size: 4, stroke, fill: stroke }, value: (_, value) => number(value, 4) || "" }))],
    }, [x, ...lines.map(({ values }) => values)], place);
  }
}

/** Exponential moving mean with the span of so many steps; gaps stay gaps. */
function smoothed(values, span) {
  if (!span) return values;
  const weight = 2 / (span + 1);
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : mean + weight * (value - mean);
    return mean;
  });
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
