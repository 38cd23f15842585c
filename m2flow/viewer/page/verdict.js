// The verdict: in one sentence what steps wait for, at most three things that would help, and alerts. Above the schedule.

import { el, replace } from "m2flow/dom.js";
import { percent, seconds } from "m2flow/format.js";

const MOST = 3;
const AGAIN_MS = 1500;

export class VerdictBar {
  /** @param view what has `viewer`, `summary`, `analysis` and `showOnly` */
  constructor(view) {
    this.view = view;
    this.alerts = [];
    this.advice = null;
    this.place = el("section", { class: "verdict", "aria-label": "Verdict" });
  }

  /** Ask for alerts and for what was simulated; again while it is. */
  async ask(isAsked = false) {
    const { source, run } = this.view.viewer;
    clearTimeout(this.timer);
    try {
      [this.alerts, this.advice] = await Promise.all([source.alerts(run), source.suggestions(run, isAsked)]);
    } catch {
      return; // The frame says that the server is gone.
    }
    if (this.view.isClosed) return;
    this.render();
    if (this.advice?.state === "running") this.timer = setTimeout(() => this.ask(), AGAIN_MS);
  }

  close() {
    clearTimeout(this.timer);
  }

  render() {
    const { analysis } = this.view;
    const verdict = analysis?.verdict;
    if (!verdict?.num_steps) return replace(this.place, this.alerts.length ? this.raised() : null);
    const apart = [analysis.setup_s > 0.05 ? `${seconds(analysis.setup_s)} before the first step` : "", analysis.evaluation_s > 0.005 ? `${seconds(analysis.evaluation_s)} of evaluation` : ""].filter(Boolean);
    return replace(this.place,
      this.raised(),
      el("div", { class: "said" },
        el("p", { class: "lead" }, verdict.sentence),
        apart.length ? el("p", { class: "quiet" }, `Accounted apart: ${apart.join(", ")}.`) : null,
        el("div", { class: "bars", role: "group", "aria-label": "What a step waits for" }, verdict.causes.slice(0, 5).map((cause) => this.cause(cause)))),
      el("div", { class: "advice" }, this.suggestions()));
  }

  cause(cause) {
    const { kinds } = this.view.summary;
    const at = kinds.findIndex((kind) => kind.label === cause.label && kind.line === cause.line);
    const text = [el("b", {}, percent(cause.share)), ` ${cause.name === "machinery" ? "nobody's work" : cause.name}`];
    const title = cause.says;
    return at < 0 ? el("span", { class: "chip", title }, text) : el("button", { class: "chip", type: "button", title, onclick: () => this.view.showOnly({ kind: at }) }, text);
  }

  suggestions() {
    const { advice } = this;
    const { state } = this.view.summary;
    if (!advice) return null;
    if (advice.state === "running") return el("p", { class: "quiet", role: "status" }, el("i", { class: "spinner small" }), " Simulating what would be faster, with what this run measured");
    if (advice.state === "none") return el("button", { class: "button", type: "button", title: state.name === "running" ? "Takes some seconds of processor time beside the run" : null, onclick: () => this.ask(true) }, "Simulate what would be faster");
    const found = advice.suggestions;
    if (!found) return advice.why_not ? el("p", { class: "quiet" }, `Nothing is suggested: ${advice.why_not}.`) : null;
    if (!found.found.length) return el("p", { class: "quiet" }, "No other placement, policy or number of processes, and no older weights, would be faster by 3% or more, simulated.");
    const one = (suggestion) => {
      const [what, setting] = split(suggestion.what);
      return el("li", {},
        el("b", { class: "gain", title: suggestion.is_simulated ? `Simulated: ${seconds(suggestion.step_s)} a step` : `At best: ${seconds(suggestion.step_s)} a step` }, `${suggestion.is_simulated ? "" : "≤ "}${percent(suggestion.gain)} less`),
        el("span", {}, what, setting ? [" ", el("code", {}, setting)] : null, suggestion.changes_mathematics ? el("span", { class: "tag" }, "changes what is trained") : null));
    };
    return [el("ol", { "aria-label": "What would be faster" }, found.found.slice(0, MOST).map(one)),
      found.is_doubtful ? el("p", { class: "quiet" }, `The simulation of the run as it was is off by ${found.error === null ? "an unknown amount" : percent(Math.abs(found.error))}: try before you trust it.`) : null];
  }

  raised() {
    const { viewer } = this.view;
    if (!this.alerts.length) return null;
    return el("ul", { class: "alerts", "aria-label": "Alerts" }, this.alerts.map((alert) => el("li", { class: alert.level, title: `Rule: ${alert.threshold}. See ${alert.page}` }, el("a", { href: viewer.link(alert.view) }, el("b", {}, alert.title), ": ", alert.says))));
  }
}

/** What to do, and how it is written, which stands at the end after a colon. */
function split(text) {
  const at = text.search(/: (?=(functions|rollout|weights|channels): \{|placement: |@flow|policy\.generate\()/);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 2)];
}
