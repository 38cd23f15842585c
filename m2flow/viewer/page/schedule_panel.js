// Beside the schedule: where the time went, or what was chosen.

import { el, errorState, facts, loadingState, replace } from "m2flow/dom.js";
import { compact, count, micros, number, percent, seconds } from "m2flow/format.js";
import { causeSwatch, kindOf, kindSwatch, meaning } from "m2flow/palette.js";

const MOST_STEPS = 40;

export class SchedulePanel {
  constructor(view, place) {
    this.view = view;
    this.place = place;
  }

  /** Where the time went. */
  render() {
    const { analysis, analysisError, summary, pair } = this.view;
    if (pair) return replace(this.place, pair.overview());
    if (analysisError) return replace(this.place, errorState("The run can't be analysed", analysisError));
    if (!analysis) return replace(this.place, loadingState("Looking for where the time went"));
    const last = analysis.steps;
    return replace(this.place,
      el("section", {},
        el("h2", {}, "Where the time went"),
        el("dl", { class: "big" },
          figure(percent(analysis.efficiency) || "n/a", "of the lower bound", "The steps' lower bounds by what they took: at 100% no schedule could have been faster"),
          last.length ? figure(seconds(analysis.step_s), "a step", "The mean of all but the first, without evaluations") : null,
          analysis.predicted_step_s ? figure(seconds(analysis.predicted_step_s), analysis.prediction_note ? "predicted" : "planned", analysis.prediction_note) : null),
        analysis.devices.map((one) => this.device(one.name, one.kinds, one.busy_s, one.idle_s))),
      analysis.path.length ? el("section", {}, el("h2", {}, "Critical path"), el("table", { class: "rows" }, el("tbody", {}, analysis.path.slice(0, 8).map((share) => this.path(share))))) : null,
      last.length ? el("section", {}, el("h2", {}, "Steps"), this.steps(last)) : null,
      this.stages(analysis),
      analysis.length_bias.length ? el("section", {}, el("h2", {}, "Length bias"), this.bias(analysis)) : null,
      el("section", {}, el("h2", {}, "Measured"), facts([["decode step", analysis.decode], ["tokens trained on", compact(analysis.trained_tokens)], ...(analysis.shared_in_training ? [["of training's tokens, computed once for several samples", percent(analysis.shared_in_training)]] : []), ...Object.entries(analysis.moved).map(([cause, number]) => [`went on away from their context: ${cause}`, count(number)]), ...Object.entries(analysis.other_tokens).map(([ending, tokens]) => [`tokens ${ending}`, compact(tokens)]), ["spans", count(summary.num_spans)]])));
  }

  device(name, kinds, busy, idle) {
    const rest = Object.entries(idle).sort((a, b) => b[1] - a[1]);
    const whole = busy + rest.reduce((sum, [, value]) => sum + value, 0) || 1;
    const style = getComputedStyle(this.place);
    const wide = this.place.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return el("div", {},
      el("h3", {}, `${name} · ${kinds} · ${percent(busy / whole)} busy`),
      el("div", { class: "stack", role: "img", "aria-label": `${name}: busy ${percent(busy / whole)}, ${rest.map(([cause, value]) => `${cause} ${percent(value / whole)}`).join(", ")}` },
        el("i", { style: { width: `${(busy / whole) * 100}%`, background: "var(--quiet)" } }),
        rest.map(([cause, value]) => { const made = causeSwatch(cause, Math.max(Math.round((value / whole) * wide), 1), 12); made.className = ""; return made; })),
      el("table", { class: "facts" }, el("tbody", {}, rest.slice(0, 5).map(([cause, value]) => el("tr", { title: meaning(cause) }, el("th", { scope: "row" }, causeSwatch(cause), " ", this.causeLink(cause)), el("td", { class: "num" }, `${percent(value / whole)}`), el("td", { class: "num quiet" }, seconds(value)))))));
  }

  causeLink(cause) {
    const at = this.view.summary.causes.indexOf(cause);
    return el("button", { class: "link", type: "button", title: "Show when", onclick: () => this.view.showOnly({ cause: at }) }, cause);
  }

  path({ label, line, share, seconds: took }) {
    const { kinds } = this.view.summary;
    const at = kinds.findIndex((kind) => kind.label === label && kind.line === line);
    const name = at >= 0 ? el("button", { class: "link", type: "button", title: "Show its spans", onclick: () => this.view.showOnly({ kind: at }) }, label) : label;
    return el("tr", {},
      el("td", { class: "left" }, at >= 0 ? kindSwatch(kinds, at) : null, " ", name, line ? [" ", lineShown(line)] : null),
      el("td", {}, percent(share)), el("td", { class: "quiet" }, seconds(took)));
  }

  steps(steps) {
    const cause = (step) => Object.keys(step.idle_s)[0] ?? "";
    return el("table", { class: "rows" },
      el("thead", {}, el("tr", {}, ["step", "took", "bound", "of it", "idle for"].map((name, at) => el("th", { scope: "col", class: at === 4 ? "left" : "" }, name)))),
      el("tbody", {}, steps.slice(-MOST_STEPS).map((step) => {
        const bound = Math.max(0, ...Object.values(step.bounds_s));
        return el("tr", { title: Object.entries(step.bounds_s).map(([name, value]) => `${name.replaceAll("_", " ")} ${seconds(value)}`).join("\n") },
          el("td", {}, el("button", { class: "link", type: "button", onclick: () => this.view.toStep(step.step) }, step.step)),
          el("td", {}, seconds(step.makespan_s)), el("td", {}, bound ? seconds(bound) : ""), el("td", {}, percent(step.efficiency)),
          el("td", { class: "left" }, cause(step) ? [causeSwatch(cause(step)), ` ${cause(step)}`] : ""));
      })));
  }

  /** What was predicted of each part of a step, and what it came to; or why nothing was. */
  stages(analysis) {
    const shown = analysis.stages.filter((stage) => stage.predicted_s !== null);
    if (!shown.length && !analysis.prediction_note) return null;
    const [word, Word] = analysis.prediction_note ? ["predicted", "Predicted"] : ["planned", "Planned"];
    return el("section", {}, el("h2", {}, `${Word} and measured`),
      shown.length ? el("table", { class: "rows" },
        el("thead", {}, el("tr", {}, ["call", word, "measured"].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, shown.map((stage) => el("tr", {},
          el("td", {}, stage.label, " ", stage.line ? lineShown(stage.line) : null),
          el("td", {}, seconds(stage.predicted_s)),
          el("td", {}, stage.seconds ? seconds(stage.seconds) : el("span", { class: "quiet", title: "No step waited for it" }, "none")))))) : null,
      analysis.prediction_note ? el("p", { class: "quiet" }, shown.length ? `Predicted ${analysis.prediction_note}.` : `Nothing was predicted: ${analysis.prediction_note}.`) : null);
  }

  bias({ length_bias: classes }) {
    const whole = classes.find((one) => one.name === "sampled")?.length;
    return el("table", { class: "rows" },
      el("thead", {}, el("tr", {}, ["samples", "number", "mean tokens", "reward"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, classes.map((one) => el("tr", {}, el("td", {}, one.name), el("td", {}, count(one.num)), el("td", {}, one.length === null ? "" : `${number(one.length, 3)}${whole ? ` (${(one.length / whole).toFixed(2)}x)` : ""}`), el("td", {}, number(one.reward, 3))))));
  }

  /** A line of the flow: what it cost, and the way to its spans. */
  showLine(at) {
    const { analysis, summary } = this.view;
    const kind = summary.kinds[at];
    const path = analysis?.path.find((one) => one.label === kind.label && one.line === kind.line);
    const stage = analysis?.stages.find((one) => one.label.split(", ").includes(kind.label) && one.line.split(", ").includes(kind.line));
    const button = (text, act) => el("button", { class: "button", type: "button", onclick: act }, text);
    return replace(this.place, el("section", {},
      this.head([kindSwatch(summary.kinds, at), kind.label]),
      kind.line ? [el("h3", {}, kind.line), kind.text ? el("code", { class: "source" }, kind.text) : null] : null,
      path ? el("p", {}, `On the critical path for ${percent(path.share)} of the steps.`) : kind.line ? el("p", { class: "quiet" }, "No step waited for it.") : null,
      facts([["a step waits", stage?.seconds ? seconds(stage.seconds) : ""], ["planned", stage?.predicted_s ? seconds(stage.predicted_s) : ""]]),
      el("div", { class: "actions" }, button("First span", () => this.view.seek(at, 1)), button("Last span", () => this.view.seek(at, -1)), button("Show all lines", () => this.view.showOnly(null)))));
  }

  /** What was chosen: a span, a sample's life, or an idle stretch. */
  async show(found) {
    const { summary, viewer } = this.view;
    const { bar } = found;
    if (found.part === "idle") {
      const cause = summary.causes[bar.k];
      return replace(this.place, el("section", {}, this.head([causeSwatch(cause), `Idle: ${cause}`]), el("p", { class: "quiet" }, `${summary.lanes[found.lane].name} ${meaning(cause)}.`), facts([["for", micros(bar.d)], ["from", micros(bar.s)], ["to", micros(bar.s + bar.d)]]), this.actions(found)));
    }
    const kind = kindOf(summary.kinds, bar.k);
    const isLife = found.part === "life";
    const about = el("div");
    replace(this.place, el("section", {},
      this.head([kindSwatch(summary.kinds, bar.k), isLife ? `Sample ${bar.call}/${bar.prompt}/${bar.member}` : kind.label]),
      kind.line ? [el("h3", {}, kind.line), kind.text ? el("code", { class: "source" }, kind.text) : null] : null,
      facts([["took", micros(bar.d)], ["from", micros(bar.s)], ["to", micros(bar.s + bar.d)], ["worker", summary.lanes[found.lane].name], ["span", bar.n > 1 ? `${count(bar.n)} spans, too narrow to tell apart here` : summary.names[bar.name]], ["step", bar.step >= 0 ? bar.step : ""], ["call", bar.call >= 0 ? bar.call : ""], ["version", bar.version >= 0 ? bar.version : ""], ["samples", bar.num_samples >= 0 ? count(bar.num_samples) : ""], ["tokens", bar.num_tokens >= 0 ? count(bar.num_tokens) : ""]]),
      this.actions(found), about));
    if (bar.n > 1) return undefined;
    const span = await viewer.source.span(viewer.run, bar.i).catch(() => null);
    const known = new Set(["call", "flow_line", "label", "step", "version", "num_samples", "num_tokens", "sample"]);
    const more = Object.entries(span?.attributes ?? {}).filter(([key, value]) => !known.has(key) && value !== null);
    if (more.length && this.view.selected === found) replace(about, el("h3", {}, "It says besides"), facts(more.map(([key, value]) => [key.replaceAll("_", " "), typeof value === "number" ? number(value) : String(value)])));
    return undefined;
  }

  head(children) {
    return el("h2", {}, children, el("button", { class: "icon", type: "button", "aria-label": "Back to where the time went", title: "Back (Esc)", onclick: () => this.view.choose(null) }, "×"));
  }

  actions(found) {
    const { view } = this;
    const { bar } = found;
    const button = (text, act) => el("button", { class: "button", type: "button", onclick: act }, text);
    return el("div", { class: "actions" },
      button("Zoom to it", () => view.zoomTo(bar.s, bar.d)),
      found.part !== "idle" ? [button("Only this line", () => { view.only = { kind: bar.k }; view.legend(); view.paint(); }), button("Previous", () => view.next(-1)), button("Next", () => view.next(1))] : button("Only this cause", () => { view.only = { cause: bar.k }; view.legend(); view.paint(); }),
      found.part === "life" ? el("a", { class: "button", href: view.viewer.link("samples", `${bar.call}-${bar.prompt}-${bar.member}`) }, "Read it") : null,
      found.part !== "idle" && bar.step >= 0 && found.part !== "life" ? el("a", { class: "button", href: view.viewer.link("samples", "step", bar.step) }, "Its step's samples") : null);
  }
}

const figure = (value, name, title) => el("div", { title }, el("dt", {}, name), el("dd", {}, value));

/** Lines of the flow without their folders, as the legend has them; the title has all of it. */
const lineShown = (line) => el("code", { class: "quiet", title: line }, line.split(", ").map((one) => one.split("/").at(-1)).join(", "));
