// The runs of a folder, the newest first.

import { el, emptyState, replace } from "m2flow/dom.js";
import { bytes, moment, seconds } from "m2flow/format.js";

export class RunsView {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
  }

  show() {
    const runs = this.viewer.runs;
    if (!runs.length) {
      replace(this.place, emptyState("No runs here yet", "A run appears here as soon as it has begun: m2flow run flows/grpo.py"));
      return;
    }
    const row = (run) =>
      el("tr", {},
        el("td", {}, el("a", { href: `#${encodeURIComponent(run.name)}/schedule` }, run.name)),
        el("td", {}, el("span", { class: `badge ${run.state.name}` }, run.state.name)),
        el("td", {}, el("code", {}, run.flow)),
        el("td", {}, moment(run.state.began_s)),
        el("td", { class: "num" }, run.state.ended_s ? seconds(run.state.ended_s - run.state.began_s) : ""),
        el("td", { class: "num" }, run.num_bytes ? bytes(run.num_bytes) : "none"),
        el("td", {}, el("a", { href: `#${encodeURIComponent(run.name)}/training` }, "training")));
    replace(this.place,
      el("div", { class: "page" },
        el("section", {}, el("h2", {}, "Runs"),
          el("table", { class: "grid" },
            el("thead", {}, el("tr", {}, ["run", "state", "flow", "began"].map((name) => el("th", { scope: "col" }, name)), el("th", { class: "num", scope: "col" }, "took"), el("th", { class: "num", scope: "col" }, "trace"), el("th", { scope: "col" }, "see"))),
            el("tbody", {}, runs.map(row))))));
    document.title = "Runs · m2flow";
  }
}
