// All responses to one prompt, side by side: reward, advantage, parts, length, and in colour what each says otherwise than one of them.

import { columnsOf } from "m2flow/sample_detail.js";
import { el, errorState, loadingState, replace } from "m2flow/dom.js";
import { count, number } from "m2flow/format.js";

const MOST_WORDS = 1200; // Of each response, that are compared.
const ORDERS = { member: "as drawn", reward: "by reward", tokens: "by length" };

export class GroupPage {
  constructor(viewer, place, data) {
    this.viewer = viewer;
    this.place = place;
    this.data = data;
    this.order = "member";
  }

  async show(call, prompt) {
    replace(this.place, loadingState("Reading the group"));
    try {
      this.page = await this.viewer.source.group(this.viewer.run, call, prompt);
    } catch (error) {
      replace(this.place, errorState("This group can't be shown", error, ["All samples", this.viewer.link("samples")]));
      return;
    }
    const { members } = this.page;
    const best = members.reduce((a, b) => ((b.reward ?? -Infinity) > (a.reward ?? -Infinity) ? b : a));
    this.against = best.member;
    this.render();
  }

  /** The groups before and after this one, of the same kind. */
  neighbours() {
    const { data, page } = this;
    const keys = [];
    for (let i = 0; i < data.call.length; i++) {
      const key = `${data.call[i]}-${data.prompt[i]}`;
      if (Boolean(data.evaluates[i]) === page.evaluates && keys.at(-1) !== key) keys.push(key);
    }
    const at = keys.indexOf(`${page.call}-${page.prompt}`);
    return [keys[at - 1], keys[at + 1]];
  }

  render() {
    const { page, viewer } = this;
    const [before, after] = this.neighbours();
    const link = (key, text) => (key ? el("a", { class: "button", href: viewer.link("samples", "group", key) }, text) : el("span", { class: "button off", "aria-disabled": "true" }, text));
    const rewards = page.members.map((one) => one.reward).filter((one) => one !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const spread = rewards.length ? Math.sqrt(rewards.reduce((sum, one) => sum + (one - mean) ** 2, 0) / rewards.length) : null;
    const sorted = [...page.members].sort((a, b) => (this.order === "member" ? a.member - b.member : (b[this.order] ?? -Infinity) - (a[this.order] ?? -Infinity)));
    const chosen = page.members.find((one) => one.member === this.against);
    replace(this.place, el("div", { class: "page group", tabindex: 0, role: "region", "aria-label": "Group" },
      el("div", { class: "grouphead" },
        el("h2", {}, `Group ${page.call}/${page.prompt}`, page.evaluates ? el("span", { class: "tag" }, "evaluation") : null),
        el("span", { class: "quiet" }, `${page.name}, `, el("code", {}, page.site), `, step ${page.step} · ${count(page.members.length)} responses`, mean === null ? "" : ` · mean reward ${number(mean, 3)}, deviation ${number(spread, 3)}`),
        el("span", { class: "right actions" }, link(before, "← Before"), link(after, "Next →"), el("a", { class: "button", href: viewer.link("samples") }, "All samples"))),
      spread === 0 && page.members.length > 1 ? el("p", { class: "notice warn" }, "All rewards are equal: nothing to learn from comparing them.") : null,
      el("div", { class: "asked" },
        el("section", {}, el("h3", {}, "Prompt"), el("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": "Prompt" }, page.prompt_text)),
        Object.keys(page.columns).length ? el("section", {}, el("h3", {}, "From the dataset"), columnsOf(page.columns)) : null),
      el("div", { class: "filters flat" },
        el("div", { class: "segments", role: "group", "aria-label": "Order" }, Object.entries(ORDERS).map(([key, name]) => el("button", { type: "button", "aria-pressed": String(this.order === key), onclick: () => { this.order = key; this.render(); } }, name))),
        el("span", { class: "quiet" }, "differences to response ", el("b", {}, this.against), " are coloured")),
      el("div", { class: "responses" }, sorted.map((one) => this.card(one, chosen)))));
  }

  card(one, chosen) {
    const { page, viewer } = this;
    const isChosen = one === chosen;
    const told = [["advantage", number(one.advantage, 3)], ["tokens", count(one.tokens)], ["ended by", one.finish], ["log-prob.", number(one.mean_logprob, 3)], ["version", one.versions.join(", ")], ["became", one.ending]];
    const tone = one.advantage === null || one.advantage === 0 ? "" : one.advantage > 0 ? " above" : " below";
    return el("article", { class: `card response${tone}${isChosen ? " chosen" : ""}`, "data-member": one.member },
      el("h3", {}, el("a", { href: viewer.link("samples", `${page.call}-${page.prompt}-${one.member}`) }, `Response ${one.member}`),
        el("b", { class: "reward" }, one.reward === null ? "no reward" : number(one.reward, 4)),
        isChosen ? el("span", { class: "tag calm" }, "compared with") : el("button", { class: "link", type: "button", onclick: () => { this.against = one.member; this.render(); } }, "compare with it")),
      el("div", { class: "tokens", tabindex: 0, role: "region", "aria-label": `Response ${one.member}` }, isChosen ? one.response || el("span", { class: "quiet" }, "(empty)") : differing(chosen.response, one.response)),
      el("dl", { class: "told" }, told.filter(([, value]) => value !== "").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      Object.keys(one.parts).length ? el("table", { class: "facts" }, el("tbody", {}, Object.entries(one.parts).map(([name, value]) => el("tr", { class: "part" }, el("th", { scope: "row" }, name), el("td", {}, number(value, 4)))))) : null);
  }
}

const pieces = (text) => (text.length < 160 ? [...text] : text.match(/\s+|[^\s\w]|\w+/gu) ?? []);

/** The text of `other`, with what `one` does not have in it marked: by the longest common subsequence of words, or of characters of short texts. */
function differing(one, other) {
  if (!other) return el("span", { class: "quiet" }, "(empty)");
  const isShort = one.length < 160 && other.length < 160;
  const cut = (text) => (isShort ? [...text] : pieces(text.padEnd(160)).slice(0, MOST_WORDS));
  const a = cut(one), b = cut(other);
  if (!isShort) while (b.length && !b.at(-1).trim()) b.pop();
  const wide = b.length + 1;
  const table = new Uint16Array((a.length + 1) * wide);
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) table[i * wide + j] = a[i] === b[j] ? table[(i + 1) * wide + j + 1] + 1 : Math.max(table[(i + 1) * wide + j], table[i * wide + j + 1]);
  const found = [];
  let i = 0, run = "", isOwn = false;
  const end = () => { if (run) found.push(isOwn ? el("mark", {}, run) : run); run = ""; };
  for (let j = 0; j < b.length; j++) {
    while (i < a.length && a[i] !== b[j] && table[(i + 1) * wide + j] >= table[i * wide + j + 1]) i++;
    const isSame = i < a.length && a[i] === b[j];
    if (isSame) i++;
    if (isOwn === isSame) { end(); isOwn = !isSame; }
    run += b[j];
  }
  end();
  const rest = other.slice(b.join("").length);
  if (rest.trim()) found.push(el("span", { class: "quiet", title: "Too long to be compared" }, rest));
  return found;
}
