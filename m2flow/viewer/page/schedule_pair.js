// Two schedules, one above the other, on one scale: they move together, and can be laid so that the same step of both begins at one place.

import { askComparison, comparedRuns, comparisonSections } from "m2flow/comparison.js";
import { el, errorState, loadingState, replace } from "m2flow/dom.js";
import { seconds } from "m2flow/format.js";
import { ScheduleView } from "m2flow/schedule.js";

const EVERY_MS = 300;

export class SchedulePair {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
    this.other = viewer.rest[1];
    this.offset = 0;
    this.step = null;
  }

  async show(summary) {
    replace(this.place, loadingState(`Reading ${this.other}`));
    let theirs;
    try {
      theirs = await this.summaryOfOther();
    } catch (error) {
      replace(this.place, errorState(`${this.other} can't be shown beside it`, error, ["The schedule alone", this.viewer.link("schedule")]));
      return;
    }
    if (this.isClosed) return;
    this.summaries = [summary, theirs];
    const strips = [el("div", { class: "strip" }), el("div", { class: "strip" })];
    const places = [el("div", { class: "pane" }), el("div", { class: "pane" })];
    this.aside = el("aside", { "aria-label": "Details", tabindex: 0 });
    replace(this.place, el("div", { class: "split" }, el("div", { class: "pair" }, strips[0], places[0], strips[1], places[1]), this.aside));
    const names = [this.viewer.run, this.other];
    this.views = names.map((run, at) => new ScheduleView(facade(this.viewer, run), places[at], this));
    this.strips = strips;
    const both = this.common();
    this.align(both[0] ?? null, false);
    await Promise.all(this.views.map((view, at) => view.show(this.summaries[at])));
    this.strip();
    await this.compare();
  }

  async summaryOfOther() {
    for (;;) {
      const found = await this.viewer.source.summary(this.other);
      if (found.loading === undefined) return found;
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }

  async update(summary) {
    if (!this.views) return;
    this.summaries = [summary, await this.viewer.source.summary(this.other)];
    await Promise.all(this.views.map((view, at) => view.update(this.summaries[at])));
    this.strip();
    await this.compare();
  }

  themed() {
    for (const view of this.views ?? []) view.themed();
  }

  close() {
    this.isClosed = true;
    for (const view of this.views ?? []) view.close();
  }

  async compare() {
    try {
      this.comparison = await askComparison(this.viewer.source, this.viewer.run, this.other);
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    if (this.isClosed || this.views.some((view) => view.selected)) return;
    replace(this.aside, this.overview());
  }

  /** Beside both, while nothing is chosen. */
  overview() {
    if (this.error) return errorState("The runs can't be compared", this.error);
    if (!this.comparison) return loadingState("Looking for what differs");
    return [el("section", {}, comparedRuns(this.comparison)), ...comparisonSections(this.comparison, this.summaries[0].kinds, this.summaries[0].causes)];
  }

  strip() {
    const both = this.common();
    const choice = el("label", {}, "laid at", el("select", { "aria-label": "Where both begin", onchange: (event) => this.align(event.target.value === "" ? null : Number(event.target.value), true) },
      el("option", { value: "", selected: this.step === null }, "the first span"), both.map((step) => el("option", { value: step, selected: this.step === step }, `step ${step}`))));
    this.summaries.forEach((summary, at) => {
      const steps = summary.marks.steps;
      const mean = steps.length ? (steps.at(-1)[2] - steps[0][1]) / steps.length / 1e6 : null;
      replace(this.strips[at], el("b", {}, "AB"[at]), el("span", {}, this.views[at].viewer.run), el("span", { class: `badge ${summary.state.name}` }, summary.state.name),
        el("span", { class: "quiet" }, [summary.mode && `${summary.mode} on ${summary.cluster}`, mean !== null && `${seconds(mean)} a step`].filter(Boolean).join(" · ")),
        at ? null : el("span", { class: "right" }, choice), at ? el("a", { class: "button right", href: this.viewer.link("schedule") }, "Close") : null);
    });
  }

  common() {
    const theirs = new Set(this.summaries[1].marks.steps.map(([step]) => step));
    return this.summaries[0].marks.steps.map(([step]) => step).filter((step) => theirs.has(step));
  }

  /** Lay the beginnings of a step of both over each other; null: the runs' first spans. */
  align(step, isShown) {
    const [one, other] = this.summaries.map((summary) => summary.marks.steps.find(([at]) => at === step));
    this.step = one && other ? step : null;
    this.offset = one && other ? other[1] - one[1] : 0;
    if (!isShown) return;
    this.strip();
    const upper = this.views[0];
    if (this.step === null) upper.all();
    else upper.zoomTo(one[1], Math.max(one[2] - one[1], other[2] - other[1]));
  }

  /** Both show as much as the longer one needs. */
  whole(view) {
    const shift = this.shift(view);
    const from = Math.min(0, -this.offset), to = Math.max(this.summaries[0].total, this.summaries[1].total - this.offset);
    const pad = Math.max((to - from) * 0.005, 1);
    return [from - pad + shift, to + pad + shift];
  }

  shift(view) {
    return this.views && view === this.views[1] ? this.offset : 0;
  }

  moved(view) {
    const other = this.views?.find((one) => one !== view);
    const by = this.shift(other) - this.shift(view);
    other?.follow(view.from + by, view.to + by);
  }

  chosen(view) {
    for (const other of this.views) if (other !== view) other.selected = null;
    for (const other of this.views) other.paint();
  }
}

/** The viewer as one of the two schedules sees it. */
function facade(viewer, run) {
  const link = (view, ...rest) => `#${[run, view, ...rest].map(encodeURIComponent).join("/")}`;
  return { run, rest: [], source: viewer.source, runs: [], link, lost: (error) => viewer.lost(error), go: (view, ...rest) => { location.hash = link(view, ...rest).slice(1); } };
}
