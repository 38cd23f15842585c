// The frame: which run and which view are shown, by the address after "#"; the header; and asking again while a run goes on.

import { emptyState, el, errorState, loadingState, replace, svg } from "m2flow/dom.js";
import { count, micros, moment, seconds } from "m2flow/format.js";
import { refreshColours } from "m2flow/palette.js";
import { findSource } from "m2flow/source.js";
import { GraphView } from "m2flow/graph.js";
import { HealthView } from "m2flow/health.js";
import { RunsView } from "m2flow/runs.js";
import { SamplesView } from "m2flow/samples.js";
import { ScheduleView } from "m2flow/schedule.js";
import { SchedulePair } from "m2flow/schedule_pair.js";
import { TrainingView } from "m2flow/training.js";

const VIEWS = { schedule: ["Schedule", ScheduleView], samples: ["Samples", SamplesView], graph: ["Graph", GraphView], training: ["Training", TrainingView], health: ["Health", HealthView] };
const LIVE_MS = 1000;
const LOADING_MS = 250;

class Viewer {
  constructor(source) {
    this.source = source;
    this.runs = [];
    this.run = "";
    this.name = "";
    this.view = null;
    this.summary = null;
    this.turn = 0;
  }

  async start() {
    applyTheme(chosenTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.themed());
    addEventListener("hashchange", () => this.route());
    await this.route();
  }

  get place() {
    return document.getElementById("view");
  }

  /** Show what the address says: #RUN/VIEW/REST, or the list of runs. */
  async route() {
    const turn = ++this.turn;
    clearTimeout(this.timer);
    this.view?.close?.();
    this.view = null;
    const [run, view, ...rest] = location.hash.slice(1).split("/").map(decodeURIComponent);
    try {
      this.runs = await this.source.runs();
    } catch (error) {
      replace(this.place, errorState("The runs can't be shown", error));
      return;
    }
    if (turn !== this.turn) return;
    if (!run && this.runs.length !== 1) {
      this.run = "";
      this.summary = null;
      this.header();
      this.view = new RunsView(this, this.place);
      this.view.show();
      return;
    }
    this.run = run || this.runs[0].name;
    this.name = VIEWS[view] ? view : "schedule";
    this.rest = rest;
    this.summary = null;
    this.header();
    replace(this.place, loadingState("Reading the run"));
    await this.follow(turn);
  }

  /** Ask for the summary, again and again while the run is read or goes on. */
  async follow(turn) {
    let again = 0;
    try {
      const found = await this.source.summary(this.run);
      if (turn !== this.turn) return;
      if (found.loading !== undefined) {
        replace(this.place, loadingState("Reading the trace", found.loading));
        again = LOADING_MS;
      } else {
        const isNew = !this.summary || this.summary.revision !== found.revision || this.summary.state.name !== found.state.name;
        const isFirst = !this.summary;
        this.summary = found;
        if (isNew) this.header();
        if (isFirst) await this.open();
        else if (isNew) await this.view?.update?.(found);
        else await this.view?.tick?.(found);
        if (this.source.isLive && found.state.name === "running") again = LIVE_MS;
      }
      this.lost(null);
    } catch (error) {
      if (turn !== this.turn) return;
      if (this.summary) this.lost(error);
      else replace(this.place, errorState("This run can't be shown", error, this.runs.length ? ["All runs", "#"] : null));
      if (this.source.isLive && this.summary) again = 3 * LIVE_MS;
    }
    if (again && turn === this.turn) this.timer = setTimeout(() => this.follow(turn), again);
  }

  async open() {
    const isPair = this.name === "schedule" && this.rest[0] === "beside" && this.rest[1];
    const View = isPair ? SchedulePair : VIEWS[this.name][1];
    document.title = `${this.run} · m2flow`;
    replace(this.place);
    this.view = new View(this, this.place);
    await this.view.show(this.summary);
  }

  lost(error) {
    document.querySelector("#lost")?.remove();
    if (error) this.place.before(el("div", { id: "lost", class: "notice bad", role: "alert" }, error.message));
  }

  go(view, ...rest) {
    location.hash = [this.run, view, ...rest].map(encodeURIComponent).join("/");
  }

  /** Open another view without leaving this place in the history twice. */
  link(view, ...rest) {
    return `#${[this.run, view, ...rest].map(encodeURIComponent).join("/")}`;
  }

  themed() {
    applyTheme(chosenTheme());
    this.view?.themed?.();
    this.header();
  }

  header() {
    const summary = this.summary;
    const children = [
      el("a", { class: "brand", href: "#", "aria-label": "m2flow: all runs" }, mark(), "m2flow"),
      this.run && this.runs.length > 1 && this.runs.some((run) => run.name === this.run)
        ? [el("h1", { class: "unseen" }, this.run), el("select", { "aria-label": "Run", onchange: (event) => { location.hash = `${encodeURIComponent(event.target.value)}/${this.name}`; } }, this.runs.map((run) => el("option", { value: run.name, selected: run.name === this.run }, run.name)))]
        : el("h1", {}, this.run || "Runs"),
      summary && el("span", { class: `badge ${summary.state.name}`, title: summary.state.reason || moment(summary.state.began_s) }, el("span", {}, summary.state.name === "stopped" && summary.state.reason ? `stopped: ${summary.state.reason}` : summary.state.name)),
      this.run && el("nav", { class: "tabs", "aria-label": "Views" }, Object.entries(VIEWS).map(([name, [label]]) => el("a", { href: this.link(name), "aria-current": name === this.name ? "page" : null }, label))),
      summary?.num_spans > 0 && el("dl", { class: "figures" }, figures(summary).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      el("button", { class: `icon${summary ? "" : " right"}`, type: "button", "aria-label": "Light or dark", title: "Light or dark", onclick: () => { keepTheme(isDark() ? "light" : "dark"); this.themed(); } }, themeIcon()),
    ];
    replace(document.getElementById("bar"), children);
  }
}

function figures(summary) {
  const steps = summary.marks.steps;
  return [
    ["steps", count(steps.length)],
    ["wall time", micros(summary.total)],
    steps.length > 1 ? ["a step", seconds((steps.at(-1)[2] - steps[0][1]) / steps.length / 1e6)] : null,
    [summary.mode || "placement", summary.lanes.length === 1 ? "1 worker" : `${count(summary.lanes.length)} workers`],
  ].filter(Boolean);
}

const mark = () =>
  svg("svg", { width: 20, height: 20, viewBox: "0 0 20 20", "aria-hidden": "true" }, [["c0", 1, 2, 11], ["c1", 6, 8, 9], ["c2", 3, 14, 15]].map(([name, x, y, width]) => svg("rect", { x, y, width, height: 4, rx: 1.5, style: { fill: `var(--${name})` } })));
const themeIcon = () =>
  svg("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true", fill: "none", stroke: "currentColor", "stroke-width": 1.5 }, svg("circle", { cx: 8, cy: 8, r: 5.5 }), svg("path", { d: "M8 2.5a5.5 5.5 0 0 1 0 11z", fill: "currentColor" }));

let kept = null;

function chosenTheme() {
  try {
    return localStorage.getItem("m2flow-theme") ?? kept;
  } catch {
    return kept; // A page that is opened from a file may have no storage.
  }
}

function keepTheme(theme) {
  kept = theme;
  try {
    localStorage.setItem("m2flow-theme", theme);
  } catch {
    // It is kept as long as the page is open.
  }
}

const isDark = () => document.documentElement.dataset.theme === "dark";

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  refreshColours();
}

addEventListener("unhandledrejection", (event) => {
  document.documentElement.dataset.failed = String(event.reason?.stack ?? event.reason);
});
addEventListener("error", (event) => {
  if (!event.error) return; // A resize that is observed once more in the next frame.
  document.documentElement.dataset.failed = String(event.message);
});

const viewer = new Viewer(await findSource());
if (viewer.source.note) document.getElementById("view").before(el("div", { class: "notice" }, viewer.source.note));
await viewer.start();
if (!viewer.runs) replace(document.getElementById("view"), emptyState("Nothing to show", ""));
