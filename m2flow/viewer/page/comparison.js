// What differs between two runs, A and B, as the server found it.

import { el, facts } from "m2flow/dom.js";
import { compact, count, number, percent, seconds } from "m2flow/format.js";
import { causeSwatch, kindSwatch } from "m2flow/palette.js";

const MOST_ROWS = 8;
const LEAST_SHARE = 0.002;

/** Ask for it, again and again while one of the runs is read. */
export async function askComparison(source, one, other) {
  for (;;) {
    const found = await source.against(one, other);
    if (found.loading === undefined) return found;
    await new Promise((resolve) => setTimeout(resolve, 250));
  }
}

/** Sections for a narrow column, or for cards side by side. */
export function comparisonSections(found, kinds = [], causes = []) {
  const { one, other } = found;
  const [headline, ...parts] = found.explained;
  return [
    el("section", {},
      el("h2", {}, "What differs"),
      el("p", { class: "lead" }, headline),
      el("ul", { class: "plain" }, parts.map((part) => el("li", {}, part))),
      found.steps.length ? table(["on average", "A", "B", "B - A"], [
        ["seconds a step", seconds(one.step_s), seconds(other.step_s), signed(other.step_s - one.step_s, "s")],
        one.efficiency !== null && other.efficiency !== null ? ["of the bound", percent(one.efficiency), percent(other.efficiency), signed(round((other.efficiency - one.efficiency) * 100), "%")] : null,
        ["tokens a second", compact(one.tokens_per_s), compact(other.tokens_per_s), signed(other.tokens_per_s - one.tokens_per_s)],
        ["devices", count(one.num_devices), count(other.num_devices), ""],
        ["samples", count(one.num_samples), count(other.num_samples), ""],
      ]) : null),
    pairs("Critical path", "call, s a step", found.path, one.step_s, (pair) => [swatchOf(kinds, pair), pair.what, pair.line ? [" ", el("code", { class: "quiet", title: pair.line }, pair.line.split("/").at(-1))] : null]),
    pairs("Devices", "device s a step", found.idle, one.step_s, (pair) => [causes.includes(pair.what) ? causeSwatch(pair.what) : null, ` ${pair.what}`]),
    found.lengths.length ? el("section", {}, el("h2", {}, "Tokens of a response"), table(["tokens", "A", "B", "B - A"], found.lengths.map((pair) => [pair.what, compact(round(pair.one)), compact(round(pair.other)), signed(round(pair.other) - round(pair.one))]))) : null,
    found.staleness.length ? el("section", {}, el("h2", {}, "Versions behind"), table(["versions", "A", "B", "B - A"], found.staleness.map((pair) => [pair.what, percent(pair.one), percent(pair.other), signed(round((pair.other - pair.one) * 100), "%")]))) : null,
    found.metrics.length ? el("section", {}, el("h2", {}, "Metrics, mean"), table(["metric", "A", "B", "B - A"], found.metrics.filter((metric) => !metric.name.startsWith("setup/")).slice(0, MOST_ROWS + 4).map((metric) => [metric.name, number(metric.one, 3), number(metric.other, 3), signed(metric.other - metric.one)]))) : null,
    found.settings.length ? el("section", {}, el("h2", {}, "Asked for differently"), el("ul", { class: "plain mono" }, found.settings.slice(0, 24).map((line) => el("li", {}, line)))) : null,
    found.plans.length ? el("section", {}, el("h2", {}, "Planned differently"), el("details", {}, el("summary", {}, `${count(found.plans.length)} ${found.plans.length === 1 ? "line" : "lines"} of the plan`), el("ul", { class: "plain mono" }, found.plans.slice(0, 60).map((line) => el("li", {}, line))))) : null,
  ].filter(Boolean);
}

export const comparedRuns = (found) => facts([["A", found.one.name], ["B", found.other.name]]);

function pairs(title, head, all, step_s, name) {
  const shown = all.filter((pair) => Math.max(pair.one ?? 0, pair.other ?? 0) > LEAST_SHARE * step_s).slice(0, MOST_ROWS);
  if (!shown.length) return null;
  const most = Math.max(...shown.map((pair) => Math.abs((pair.other ?? 0) - (pair.one ?? 0)))) || 1;
  const rows = shown.map((pair) => {
    const more = (pair.other ?? 0) - (pair.one ?? 0);
    return [name(pair), seconds(pair.one ?? 0), seconds(pair.other ?? 0), el("span", { class: `more ${more > 0 ? "up" : "down"}` }, el("i", { style: { width: `${(Math.abs(more) / most) * 34}px` } }), signed(more, "s"))];
  });
  return el("section", {}, el("h2", {}, title), table([head, "A", "B", "B - A"], rows));
}

function swatchOf(kinds, pair) {
  const exact = kinds.findIndex((kind) => kind.label === pair.what && kind.line === pair.line);
  const at = exact >= 0 ? exact : kinds.findIndex((kind) => kind.label === pair.what);
  return at >= 0 ? [kindSwatch(kinds, at), " "] : null;
}

const table = (heads, rows) => el("table", { class: "rows" },
  el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
  el("tbody", {}, rows.filter(Boolean).map((cells) => el("tr", {}, cells.map((cell, at) => el("td", { class: at ? "" : "left" }, cell))))));

const round = (value) => (value === null ? null : Math.round(value * 10) / 10);

function signed(value, unit = "") {
  if (!Number.isFinite(value)) return "";
  const size = compact(Number(Math.abs(value).toPrecision(3)));
  const text = unit === "s" ? seconds(Math.abs(value)) : `${size}${unit}`;
  return `${value > 0 ? "+" : value < 0 ? "−" : "±"}${text}`;
}
