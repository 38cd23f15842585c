// Workers, channels, what happened to them, and what they printed.

import { el, errorState, loadingState, replace, svg } from "m2flow/dom.js";
import { bytes, compact, count, micros, moment, number, percent, seconds } from "m2flow/format.js";

const EVERY_MS = 2000;
const SILENT_US = 15e6;

export class HealthView {
  constructor(viewer, place) {
    this.viewer = viewer;
    this.place = place;
    this.log = "";
  }

  async show(summary) {
    this.summary = summary;
    replace(this.place, loadingState("Asking after the workers"));
    await this.fetch();
  }

  async update(summary) {
    this.summary = summary;
    if (performance.now() - this.asked > EVERY_MS) await this.fetch();
  }

  async fetch() {
    this.asked = performance.now();
    const { source, run } = this.viewer;
    try {
      this.health = await source.health(run);
      if (!this.log && this.health.logs.length) this.log = this.health.logs[0];
      this.text = this.log ? await source.log(run, this.log) : "";
    } catch (error) {
      replace(this.place, errorState("The run's health can't be shown", error));
      return;
    }
    this.render();
  }

  /** What each worker is, and what it took of its machine. What none has said has no column. */
  workers(heads, said) {
    const { workers } = this.health;
    if (!workers.length) return el("p", { class: "quiet" }, "No worker has begun.");
    const columns = [
      ["worker", (one) => one.name],
      ["device", (one) => one.device],
      ["engines", (one) => one.engines.join(", ")],
      ["#threads", (one) => one.threads || ""],
      ["#cores, mean", (one) => number(one.cpu_cores, 2), "cpu_cores"],
      ["#memory, most", (one) => (one.memory_bytes === null ? "" : bytes(one.memory_bytes)), "memory_bytes"],
      ["#GPU busy, mean", (one) => percent(one.gpu_use), "gpu_use"],
      ["#GPU memory, most", (one) => (one.gpu_memory_bytes === null ? "" : bytes(one.gpu_memory_bytes)), "gpu_memory_bytes"],
      ["#spans", (one) => count(one.num_spans)],
      ["last said something", said],
      ["#lost", (one) => (one.num_losses ? el("span", { style: { color: "var(--bad)" } }, `${one.num_losses} times`) : "no")],
    ].filter(([, , field]) => !field || workers.some((one) => one[field] !== null));
    const cell = (one) => ([name, shown]) => el("td", { class: name.startsWith("#") ? "num" : "" }, shown(one));
    return el("table", { class: "grid" }, heads(columns.map(([name]) => name)), el("tbody", {}, workers.map((one) => el("tr", {}, columns.map(cell(one))))));
  }

  /** Credits: what is under way to whom, of what may be. */
  rooms() {
    const { rooms } = this.health;
    if (!rooms.length) return null;
    const full = (used, room) => (room ? el("span", { class: "gauge", role: "img", "aria-label": `${percent(used / room)} used` }, el("i", { style: { width: `${Math.min(used / room, 1) * 100}%`, background: used >= room ? "var(--warn)" : "var(--accent)" } })) : null);
    return el("table", { class: "grid", style: { marginBottom: "14px" } },
      el("thead", {}, el("tr", {}, ["under way from", "to", "#samples", "#at most", "#room", "used", "#bytes", "#room for"].map((name) => el("th", { scope: "col", class: name.startsWith("#") ? "num" : "" }, name.replace("#", ""))))),
      el("tbody", {}, rooms.map((room) => el("tr", {},
        el("td", {}, room.producer), el("td", {}, room.target), el("td", { class: "num" }, count(room.samples)), el("td", { class: "num" }, count(room.most_samples)), el("td", { class: "num" }, room.room_samples ? count(room.room_samples) : "no limit"), el("td", {}, full(room.samples, room.room_samples)), el("td", { class: "num" }, bytes(room.num_bytes)), el("td", { class: "num" }, room.room_bytes ? bytes(room.room_bytes) : "no limit")))));
  }

  /** What workers counted, each with its course over the run. */
  counters() {
    const shown = (name) => (/byte|memory|rss/i.test(name) ? bytes : (value) => compact(value === null ? null : Number(value.toPrecision(4))));
    const row = (one) => el("tr", {}, el("td", {}, one.worker), el("td", {}, one.name), el("td", { class: "num" }, shown(one.name)(one.last)), el("td", { class: "num" }, shown(one.name)(one.least)), el("td", { class: "num" }, shown(one.name)(one.most)), el("td", {}, sparkline(one, this.summary.total)));
    const heads = ["worker", "counter", "#now", "#least", "#most", "over the run"];
    return el("table", { class: "grid" }, el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col", class: name.startsWith("#") ? "num" : "" }, name.replace("#", ""))))), el("tbody", {}, this.health.counters.map(row)));
  }

  render() {
    const { health, summary } = this;
    const old = this.place.querySelector(".page");
    const scrolled = old?.scrollTop ?? 0;
    const isLive = summary.state.name === "running";
    const heads = (names) => el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col", class: name.startsWith("#") ? "num" : "" }, name.replace("#", "")))));
    const said = (worker) => {
      if (worker.last_us === null) return el("span", { class: "quiet" }, "nothing yet");
      const ago = summary.total - worker.last_us;
      return isLive && ago > SILENT_US ? el("span", { style: { color: "var(--warn)" } }, `${micros(ago)} ago`) : isLive ? `${micros(ago)} ago` : `at ${micros(worker.last_us)}`;
    };
    const page = el("div", { class: "page", tabindex: 0, role: "region", "aria-label": "Health" }, el("div", { class: "spread" },
      el("section", {}, el("h2", {}, "Run"), el("table", { class: "grid" }, el("tbody", {}, [
        ["state", el("span", { class: `badge ${summary.state.name}` }, summary.state.name)], ["why it ended", summary.state.name === "stopped" ? summary.state.reason : ""], ["began", moment(summary.state.began_s)], ["took", summary.state.ended_s ? seconds(summary.state.ended_s - summary.state.began_s) : ""], ["attempts", summary.state.num_attempts > 1 ? count(summary.state.num_attempts) : ""], ["flow", el("code", {}, summary.flow)], ["cluster", summary.mode ? `${summary.mode} on ${summary.cluster}` : summary.cluster], ["options", Object.entries(summary.options).map(([name, value]) => `${name}=${value}`).join("  ")], ["tokens lost", health.num_lost_tokens ? count(health.num_lost_tokens) : ""], ["trace not readable", summary.num_lost_bytes && !isLive ? bytes(summary.num_lost_bytes) : ""],
      ].filter(([, value]) => value !== "").map(([name, value]) => el("tr", {}, el("th", { scope: "row", style: { width: "150px" } }, name), el("td", {}, value)))))),
      health.failed_calls.length ? el("section", {}, el("h2", {}, "Calls that failed"), el("table", { class: "grid" }, heads(["#call", "name", "line", "error"]), el("tbody", {}, health.failed_calls.map(([ordinal, name, line, error], at) => el("tr", {}, el("td", { class: "num" }, ordinal), el("td", { class: "whole" }, name), el("td", { class: "whole" }, el("code", { title: line }, line.split("/").at(-1))), at && error === health.failed_calls[at - 1][3] ? el("td", { class: "quiet" }, "the same") : el("td", {}, el("pre", {}, error))))))) : null,
      el("section", {}, el("h2", {}, "Workers"), this.workers(heads, said)),
      el("section", {}, el("h2", {}, "Channels"), this.rooms(), health.channels.length ? el("table", { class: "grid" }, heads(["from", "to", "#parcels", "#samples", "#sent", "#blocked"]), el("tbody", {}, health.channels.map((one) => el("tr", {}, el("td", {}, one.source), el("td", {}, one.target), el("td", { class: "num" }, compact(one.parcels)), el("td", { class: "num" }, compact(one.samples)), el("td", { class: "num" }, bytes(one.num_bytes)), el("td", { class: "num" }, seconds(one.blocked_s)))))) : el("p", { class: "quiet" }, "Nothing was sent between workers.")),
      health.counters.length ? el("section", {}, el("h2", {}, "Counters"), this.counters()) : null,
      el("section", {}, el("h2", {}, "What happened"), health.happened.length ? el("table", { class: "grid" }, heads(["when", "what", "to", "because"]), el("tbody", {}, health.happened.map((one) => el("tr", {}, el("td", {}, moment(one.at_s)), el("td", {}, one.kind), el("td", {}, one.who), el("td", {}, one.what))))) : el("p", { class: "quiet" }, "Nothing out of the ordinary.")),
      el("section", {}, el("h2", {}, "Log"), health.logs.length ? [
        el("div", { class: "actions", role: "group", "aria-label": "Whose log" }, health.logs.map((name) => el("button", { class: "button", type: "button", "aria-pressed": String(name === this.log), onclick: () => { this.log = name; this.fetch(); } }, name))),
        el("pre", { class: "log", tabindex: 0, "aria-label": `Log of ${this.log}` }, this.text || "It has printed nothing."),
      ] : el("p", { class: "quiet" }, "There are no logs."))));
    const kept = this.place.querySelector("pre.log");
    const atEnd = !kept || kept.scrollTop + kept.clientHeight >= kept.scrollHeight - 4;
    const was = kept?.scrollTop ?? 0;
    replace(this.place, page);
    page.scrollTop = scrolled;
    const log = page.querySelector("pre.log");
    if (log) log.scrollTop = atEnd ? log.scrollHeight : was;
  }
}

function sparkline({ at, values, least, most }, total) {
  const wide = 220, tall = 22, span = most - least;
  const y = (value) => (span > 0 ? tall - 2 - ((value - least) / span) * (tall - 4) : tall / 2).toFixed(1);
  const x = (us) => ((us / (total || 1)) * (wide - 2) + 1).toFixed(1);
  const steps = values.map((value, i) => `${i ? `H${x(at[i])} V` : `M${x(at[i])} `}${y(value)}`).join(" ");
  return svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, class: "spark", "aria-hidden": "true" }, svg("path", { d: `${steps} H${wide - 1}` }));
}
