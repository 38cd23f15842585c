// One sample: prompt, response token by token, rewards, life. What a model wrote goes into text nodes only.

import { el, facts, hideTip, showTip } from "m2flow/dom.js";
import { count, micros, number } from "m2flow/format.js";

const MODES = { version: "version", logprob: "log-probability", advantage: "advantage" };
const MOST_SHOWN = 6000;

export function sampleDetail(page, { row, data, onclose, schedule, group }) {
  const advantage = row >= 0 ? data.advantage[row] : null;
  const tokens = el("div", { class: page.has_texts ? "tokens" : "tokens ids", tabindex: 0, role: "region", "aria-label": "Prompt and response, token by token" });
  const scale = el("div", { class: "scale" });
  const buttons = Object.entries(MODES).map(([mode, name]) => el("button", { class: "button", type: "button", "data-mode": mode, onclick: () => paint(mode) }, name));
  const paint = (mode) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
    fill(tokens, page, mode, advantage);
    scale.replaceChildren(...legend(page, mode, advantage));
  };
  paint(new Set(page.versions.filter((one) => one !== null)).size > 1 ? "version" : "logprob");
  const place = row >= 0 && data.start[row] !== null ? el("button", { class: "button", type: "button", onclick: () => schedule(data.start[row], (data.trained[row] ?? data.end[row]) - data.start[row]) }, "Show it in the schedule") : null;
  return [
    el("section", {},
      el("h2", {}, `Sample ${page.call}/${page.prompt}/${page.member}`, el("button", { class: "icon", type: "button", "aria-label": "Close", onclick: onclose }, "×")),
      facts([["asked for by", `${page.name}, ${page.site}, step ${page.step}`], ["tokens", `${count(page.prompt_tokens)} of the prompt, ${count(page.response_tokens)} generated; ended by ${page.finish}`], ["mean log-probability", number(mean(page.logprobs), 4)], ["advantage", advantage === null ? "" : `${number(advantage, 4)} in its group`], ["waited", row >= 0 && data.wait[row] !== null ? `${micros(data.wait[row])} for training` : ""], ["staleness", row >= 0 && data.staleness[row] !== null ? count(data.staleness[row]) : ""]]),
      row >= 0 && data.evaluates[row] ? el("p", {}, el("span", { class: "tag" }, "evaluation"), " It trains nothing.") : null,
      el("div", { class: "actions" }, group ? el("a", { class: "button", href: group }, "All responses to its prompt") : null, place)),
    Object.keys(page.columns).length ? el("section", {}, el("h2", {}, "From the dataset"), columnsOf(page.columns)) : null,
    el("section", {}, el("h2", {}, "Tokens"), el("div", { class: "actions", role: "group", "aria-label": "Colour tokens by" }, buttons), scale, tokens,
      page.num_left_out ? el("p", { class: "quiet" }, `${count(page.num_left_out)} more tokens are not shown.`) : null,
      page.has_texts ? null : el("p", { class: "quiet" }, "Tokens are shown as numbers until the run has a checkpoint with its tokenizer."),
      page.has_texts ? null : [el("h3", {}, "Prompt"), el("div", { class: "tokens" }, page.prompt_text), el("h3", {}, "Response"), el("div", { class: "tokens" }, page.response_text)]),
    page.passed.length ? el("section", {}, el("h2", {}, "Time line"), timeLine(page)) : null,
    el("section", {}, el("h2", {}, "Rewards"), rewardsOf(page)),
    el("section", {}, el("h2", {}, "Life"), el("ol", { class: "life" }, page.life.map((event) => el("li", {}, event)))),
  ];
}

/** The turns and tool calls of an episode by time, each in a line of its own, and what of their prompts the engine's cache had. */
function timeLine(page) {
  const turns = page.passed.filter((one) => !one.is_tool);
  const [prompt, cached] = ["num_prompt_tokens", "num_cached"].map((key) => turns.reduce((sum, one) => sum + (one.about[key] ?? 0), 0));
  const share = (of) => `${((of / Math.max(page.took, 1)) * 100).toFixed(3)}%`;
  const told = (one) => one.is_tool ? one.about.outcome : `${count(one.about.num_tokens)} tokens`;
  return [
    el("ol", { class: "passed", "aria-label": "Turns and tool calls by time" }, page.passed.map((one) => {
      const bar = el("i", { class: one.is_tool ? "bar tool" : "bar" });
      bar.style.marginLeft = share(one.start);
      bar.style.width = share(one.duration);
      const facts_ = [["from", micros(one.start)], ["for", micros(one.duration)], ...Object.entries(one.about)];
      return el("li", { onpointermove: (event) => showTip(event, el("b", {}, one.name), facts(facts_)), onpointerleave: hideTip },
        el("span", {}, one.name), el("span", { class: "track" }, bar), el("span", { class: "quiet" }, `${told(one)}, ${micros(one.duration)}`));
    })),
    cached ? el("p", { class: "quiet" }, `${Math.round((cached / prompt) * 100)}% of the tokens before its turns were found in the engine's prefix cache.`) : null,
    page.moved.length ? el("p", { class: "quiet" }, `Turns that went on away from its context: ${page.moved.length} (${[...new Set(page.moved)].join(", ")}).`) : null,
  ];
}

/** A dataset's columns: text as it is, all else as JSON. */
export const columnsOf = (columns) => el("table", { class: "facts" }, el("tbody", {}, Object.entries(columns).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "given" }, typeof value === "string" ? value : JSON.stringify(value))))));

/** Each reward, and beneath it what it is made of where its function says so. */
function rewardsOf(page) {
  const rewards = Object.entries(page.rewards);
  if (!rewards.length) return el("p", { class: "quiet" }, "None yet.");
  const row = (name, value, kind) => el("tr", { class: kind }, el("th", { scope: "row" }, name), el("td", {}, number(value, 5)));
  return el("table", { class: "facts" }, el("tbody", {}, rewards.map(([by, value]) => [row(by, value), Object.entries(page.parts[by] ?? {}).map(([name, part]) => row(name, part, "part"))])));
}

function fill(place, page, mode, advantage) {
  const parts = page.pieces.slice(0, MOST_SHOWN).map((piece, i) => {
    const made = el("span", { class: page.kinds[i] === 1 ? "generated" : "prompt", "data-i": i }, piece);
    const background = page.kinds[i] === 1 ? shade(page, mode, i, advantage) : null;
    if (background) made.style.background = background;
    return made;
  });
  place.replaceChildren(...(page.blocks.length ? conversation(page, parts) : parts));
  place.onpointermove = (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined) return hideTip();
    const per = page.advantages.length ? page.advantages[i] : page.kinds[i] === 1 ? advantage : null;
    return showTip(event, el("b", {}, JSON.stringify(page.pieces[i])), facts([["token", i], ["log-probability", number(page.logprobs[i], 4)], ["probability", page.logprobs[i] === null ? "" : number(Math.exp(page.logprobs[i]), 3)], ["version", page.versions[i]], ["advantage", number(per, 4)], ["experts by layer", page.experts[i] || ""]]));
  };
  place.onpointerleave = hideTip;
}

/** A block for each turn of an episode, and for what stands between them: who said it, and by whom it is trained. */
function conversation(page, parts) {
  return page.blocks.filter(({ start }) => start < parts.length).map(({ start, end, is_turn: isTurn, title, trained }) =>
    el("div", { class: isTurn ? "turn generated" : "turn" },
      el("h3", {}, title, el("span", { class: "quiet" }, `${count(end - start)} ${end - start === 1 ? "token" : "tokens"}${trained ? `, ${trained}` : ""}`)),
      parts.slice(start, end)));
}

/** Mixed into the background, so that text stays readable in both themes. */
function shade(page, mode, i, advantage) {
  const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(share * 100)}%, transparent)`;
  if (mode === "version") {
    if (page.versions[i] === null || page.versions[i] === undefined) return null;
    return mix(`c${page.versions[i] % 8}`, 0.38);
  }
  if (mode === "logprob") {
    const value = page.logprobs[i];
    return value === null || value === undefined ? null : mix("c3", Math.min(Math.max(-value / 5, 0), 1) * 0.7);
  }
  const value = page.advantages.length ? page.advantages[i] : advantage;
  return value === null || value === undefined || !value ? null : mix(value > 0 ? "c0" : "c3", Math.min(Math.abs(value) / 2, 1) * 0.6);
}

const versionsOf = (page) => [...new Set(page.versions.filter((one) => one !== null))].sort((a, b) => a - b);

function legend(page, mode, advantage) {
  const entry = (background, text) => { const box = el("i", { class: "swatch" }); box.style.background = background; return el("span", {}, box, text); };
  const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(share * 100)}%, transparent)`;
  if (mode === "version") return versionsOf(page).map((version) => entry(mix(`c${version % 8}`, 0.38), `version ${version}`));
  if (mode === "logprob") return [0, -1, -2.5, -5].map((value) => entry(mix("c3", Math.min(-value / 5, 1) * 0.7), value === -5 ? "-5 and below" : String(value)));
  if (!page.advantages.length && advantage === null) return [el("span", {}, "Its group has no spread to compare it with.")];
  return [entry(mix("c0", 0.6), "above its group"), entry(mix("c3", 0.6), "below"), page.advantages.length ? null : el("span", {}, "one number for all tokens: (reward - mean) / deviation of its group")].filter(Boolean);
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}
