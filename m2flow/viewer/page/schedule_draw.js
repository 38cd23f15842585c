// The schedule on a canvas: bars, idle time, spans, marks. Reads what it is given and draws it; keeps nothing.

import { clock, compact, marks, percent } from "m2flow/format.js";
import { colour, kindOf, ofCause, ofKind } from "m2flow/palette.js";
import { AXIS, GUTTER, HEAD, STEPS, VERSIONS } from "m2flow/schedule_layout.js";

const FONT = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif';
const SMALL = FONT.replace("11.5px", "10.5px");
const BOLD = `600 ${FONT}`;
const DIM = 0.16;
const LEAST_PLAN = 12, MARK = 3; // Pixels: of a plan whose parts are drawn, and of one too narrow for that.
const GHOST = 4; // Pixels that a ghost stands out above and below its lane's bars.

/**
 * @param scene summary, layout, held (lane -> answer of the server), from and to in microseconds, width, height, scroll, only (a kind, or
 *   null), hover and selected ({lane, part, row, bar} or null), analysis (or null)
 */
export function draw(context, scene) {
  const { summary, layout, width, height, scroll, from, to } = scene;
  const scale = (width - GUTTER) / (to - from);
  const x = (us) => GUTTER + (us - from) * scale;
  const styles = summary.kinds.map((_, at) => ofKind(summary.kinds, at));
  context.clearRect(0, 0, width, height);
  context.fillStyle = colour("page");
  context.fillRect(0, 0, width, height);
  context.save();
  context.beginPath();
  context.rect(0, HEAD, width, height - HEAD);
  context.clip();
  context.translate(0, HEAD - scroll);
  const time = marks(from, to, (width - GUTTER) / 110);
  context.strokeStyle = colour("grid");
  context.lineWidth = 1;
  context.beginPath();
  for (const at of time.at) line(context, Math.round(x(at)) + 0.5, scroll, scroll + height);
  context.stroke();
  for (const lane of layout.lanes) {
    if (lane.top > scroll + height || lane.top + lane.height < scroll - 20) continue;
    if (lane.kind === "plan") drawPlan(context, scene, lane, x);
    else drawLane(context, scene, lane, x, scale, styles);
  }
  drawOver(context, scene, x);
  drawGutter(context, scene);
  context.restore();
  drawAxis(context, scene, x, time);
}

function drawLane(context, scene, lane, x, scale, styles) {
  const { width, held, only, from, to } = scene;
  const data = held.get(lane.at);
  context.save();
  context.beginPath();
  context.rect(GUTTER, lane.top - 4, width - GUTTER, lane.height + 8);
  context.clip();
  context.fillStyle = colour("panel");
  for (const [top, tall] of lane.work) context.fillRect(GUTTER, top, width - GUTTER, tall);
  if (!data) {
    context.restore();
    return;
  }
  drawGhosts(context, scene, lane, x);
  if (data.idle && lane.work.length) {
    const { s, d, k } = data.idle;
    const [top, tall] = lane.work[0];
    for (let i = 0; i < s.length; i++) {
      const left = Math.max(x(s[i]), GUTTER), right = Math.min(x(s[i] + d[i]), width);
      if (right - left < 0.7) continue;
      context.globalAlpha = only === null || only.cause === k[i] ? 1 : DIM;
      context.fillStyle = ofCause(context, scene.summary.causes[k[i]]);
      context.fillRect(left, top, right - left, tall);
    }
    context.globalAlpha = 1;
  }
  lane.work.forEach(([top, tall], row) => bars(context, scene, data.work[row], styles, x, top, tall, true));
  if (lane.wait) (data.wait ?? []).slice(0, 1).forEach((row) => bars(context, scene, row, styles, x, lane.wait[0], lane.wait[1], false));
  if (lane.running && data.running.length) drawRunning(context, scene, lane, data, x);
  lane.spans.forEach(([top, tall], row) => data.life?.[row] && bars(context, scene, data.life[row], styles, x, top, tall, false));
  context.restore();
}

function bars(context, scene, row, styles, x, top, tall, hasText) {
  if (!row) return;
  const { width, only, summary } = scene;
  const { s, d, k, f, n } = row;
  let last = -1;
  for (let i = 0; i < s.length; i++) {
    let left = x(s[i]);
    if (left > width) break;
    let right = x(s[i] + d[i]);
    if (right < GUTTER) continue;
    left = Math.max(left, GUTTER);
    right = Math.max(Math.min(right, width), left + 1);
    if (right - left > 2.5 && !n) right -= 0.6; // A seam between neighbours.
    const isOff = only !== null && only.kind !== k[i];
    const style = styles[k[i]] ?? ofKind(summary.kinds, k[i]);
    if (k[i] !== last) {
      context.fillStyle = style.fill;
      last = k[i];
    }
    context.globalAlpha = isOff ? DIM : f ? 0.4 + 0.6 * f[i] : 1;
    context.fillRect(left, top, right - left, tall);
    if (hasText && tall > 16 && right - left > 34 && !isOff) {
      const text = barText(summary, row, i);
      context.font = SMALL;
      context.fillStyle = style.ink;
      last = -1;
      const room = right - left - 8;
      if (context.measureText(text).width <= room) context.fillText(text, left + 4, top + tall / 2 + 3.7);
      else if (room > 40) clipText(context, text, left + 4, top + tall / 2 + 3.7, room);
    }
  }
  context.globalAlpha = 1;
}

function barText(summary, row, i) {
  const kind = kindOf(summary.kinds, row.k[i]);
  const name = summary.names[row.name[i]] ?? "";
  if (name === "rollout.step" && row.num_samples?.[i] > 0) return row.num_samples[i] === 1 ? "1 sample" : `${row.num_samples[i]} samples`;
  if (name.startsWith("train.") && name !== "train.accumulate") return name.slice(6);
  return kind.label;
}

function clipText(context, text, left, base, room) {
  if (context.measureText(text).width <= room) {
    context.fillText(text, left, base);
    return;
  }
  let cut = text.length;
  while (cut > 3 && context.measureText(`${text.slice(0, cut)}…`).width > room) cut--;
  if (cut > 3) context.fillText(`${text.slice(0, cut)}…`, left, base);
}

function drawRunning(context, scene, lane, data, x) {
  const [top, tall] = lane.running;
  const most = Math.max(1, ...data.running, scene.mostRunning?.get(lane.at) ?? 0);
  const between = (data.to - data.from) / (data.running.length - 1);
  context.beginPath();
  context.moveTo(x(data.from), top + tall);
  data.running.forEach((value, i) => context.lineTo(x(data.from + i * between), top + tall - (value / most) * (tall - 2)));
  context.lineTo(x(data.to), top + tall);
  context.closePath();
  context.globalAlpha = 0.22;
  context.fillStyle = colour("quiet");
  context.fill();
  context.globalAlpha = 0.8;
  context.strokeStyle = colour("quiet");
  context.lineWidth = 1;
  context.stroke();
  context.globalAlpha = 1;
}

/** What the plan said that this lane would do when, behind what it did: a little taller, so that it is seen above and below. */
function drawGhosts(context, scene, lane, x) {
  const { predicted, marks } = scene.summary;
  if (!predicted || !lane.work.length) return;
  const [top, tall] = lane.work[0];
  for (const [, start] of marks.steps) {
    let at = start;
    for (const [, seconds, isCritical, workers] of predicted.parts) {
      if (!isCritical) continue;
      const left = Math.max(x(at), GUTTER), right = Math.min(x(at + seconds * 1e6), scene.width);
      at += seconds * 1e6;
      if (!workers.includes(lane.lane.name) || right - left < 1) continue;
      context.fillStyle = colour("ghost");
      context.fillRect(left, top - GHOST, right - left, tall + 2 * GHOST);
      context.strokeStyle = colour("quiet");
      context.setLineDash([3, 2]);
      context.strokeRect(left + 0.5, top - GHOST + 0.5, Math.max(right - left - 1, 1), tall + 2 * GHOST - 1);
      context.setLineDash([]);
    }
  }
}

function drawPlan(context, scene, lane, x) {
  const { predicted, marks } = scene.summary;
  const { width } = scene;
  for (const [, start] of marks.steps) {
    const left = x(start), right = x(start + predicted.step_s * 1e6);
    if (right < GUTTER || left > width) continue;
    let at = start;
    if (right - left < LEAST_PLAN) { // Its parts are too narrow to be seen: all of it as a mark.
      context.fillStyle = colour("quiet");
      context.fillRect(Math.max(left, GUTTER), lane.top, Math.max(right - Math.max(left, GUTTER), MARK), lane.height - 6);
      continue;
    }
    context.strokeStyle = colour("quiet");
    context.setLineDash([3, 2]);
    for (const [what, seconds, isCritical] of predicted.parts) {
      if (!isCritical) continue;
      const from = Math.max(x(at), GUTTER), to = Math.min(x(at + seconds * 1e6), width);
      at += seconds * 1e6;
      if (to - from < 1) continue;
      context.globalAlpha = 0.12;
      context.fillStyle = colour("quiet");
      context.fillRect(from, lane.top, to - from, lane.height - 6);
      context.globalAlpha = 1;
      context.strokeRect(from + 0.5, lane.top + 0.5, Math.max(to - from - 1, 1), lane.height - 7);
      if (to - from > 40) {
        context.font = SMALL;
        context.fillStyle = colour("quiet");
        clipText(context, what, from + 4, lane.top + 13, to - from - 8);
      }
    }
    context.setLineDash([]);
  }
}

/** Versions, bounds and the ends of steps, over all lanes. */
function drawOver(context, scene, x) {
  const { summary, width, height, scroll, analysis } = scene;
  const bottom = scroll + height;
  context.lineWidth = 1;
  const isClose = (a, b) => Math.abs(a - b) < 3;
  context.strokeStyle = colour("strong");
  context.beginPath();
  let last = -9;
  for (const [, , end] of summary.marks.steps) {
    const at = x(end);
    if (at < GUTTER || at > width || isClose(at, last)) continue;
    line(context, Math.round(at) + 0.5, scroll, bottom);
    last = at;
  }
  context.stroke();
  context.strokeStyle = colour("version");
  context.globalAlpha = 0.75;
  context.setLineDash([2, 3]);
  context.beginPath();
  last = -9;
  for (const [, , at] of summary.marks.versions) {
    const place = x(at);
    if (place < GUTTER || place > width || isClose(place, last)) continue;
    line(context, Math.round(place) + 0.5, scroll, bottom);
    last = place;
  }
  context.stroke();
  context.setLineDash([6, 3]);
  context.strokeStyle = colour("good");
  context.beginPath();
  for (const step of analysis?.steps ?? []) {
    const bound = Math.max(0, ...Object.values(step.bounds_s));
    const at = x(step.start + bound * 1e6);
    if (bound && at > GUTTER && at < width && (bound * 1e6 * (width - GUTTER)) / (scene.to - scene.from) > 24) line(context, Math.round(at) + 0.5, scroll, bottom);
  }
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
  for (const [mark, name] of [[scene.hover, "ink"], [scene.selected, "accent"]]) {
    const found = mark && place(scene, mark);
    if (!found) continue;
    const left = Math.max(x(found.start), GUTTER), right = Math.min(Math.max(x(found.start + found.duration), left + 2), width);
    context.strokeStyle = colour(name);
    context.lineWidth = name === "accent" ? 2 : 1.2;
    context.strokeRect(left - 0.5, found.top - 0.5, right - left + 1, found.tall + 1);
  }
  context.lineWidth = 1;
}

/** Where a bar that was pointed at stands now. */
function place(scene, { lane: at, part, row, bar }) {
  const lane = scene.layout.lanes.find((one) => one.at === at && one.kind === "lane");
  const slot = { work: lane?.work[row], wait: lane?.wait, life: lane?.spans[row], idle: lane?.work[0] }[part];
  return slot && { top: slot[0], tall: slot[1], start: bar.s, duration: bar.d };
}

function drawGutter(context, scene) {
  const { layout, height, scroll, summary } = scene;
  context.fillStyle = colour("page");
  context.fillRect(0, scroll, GUTTER - 1, height);
  context.strokeStyle = colour("line");
  context.beginPath();
  line(context, GUTTER - 0.5, scroll, scroll + height);
  context.stroke();
  for (const lane of layout.lanes) {
    if (lane.top > scroll + height || lane.top + lane.height < scroll) continue;
    if (lane.kind === "plan") {
      text(context, "plan", 14, lane.top + 13, BOLD, "quiet");
      continue;
    }
    const isNarrow = GUTTER < 120;
    text(context, lane.name, isNarrow ? 8 : 14, lane.top + 12, BOLD, "ink", isNarrow ? GUTTER - 12 : GUTTER - 66);
    text(context, isNarrow ? `${percent(lane.lane.busy_share)} busy` : lane.lane.engines.join(", ") || "", isNarrow ? 8 : 14, lane.top + 26, SMALL, "quiet", isNarrow ? GUTTER - 12 : GUTTER - 30);
    context.textAlign = "right";
    if (!isNarrow) text(context, percent(lane.lane.busy_share), GUTTER - 12, lane.top + 12, FONT, "quiet");
    context.textAlign = "left";
    if (lane.running) {
      const open = lane.isExpanded ? "▾" : "▸";
      const most = compact(scene.mostRunning?.get(lane.at) ?? lane.lane.num_rows.life);
      text(context, isNarrow ? `${open} up to ${most}` : `${open} samples, up to ${most}`, isNarrow ? 8 : 14, lane.running[0] + 17, SMALL, "quiet");
    }
  }
  if (!summary.lanes.length) text(context, "no spans yet", 14, 24, FONT, "quiet");
}

function drawAxis(context, scene, x, time) {
  const { summary, width, from, to, analysis } = scene;
  context.fillStyle = colour("page");
  context.fillRect(0, 0, width, HEAD);
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, width - GUTTER, HEAD);
  context.clip();
  for (const at of time.at) text(context, clock(at, time.between), x(at) + 4, 15, SMALL, "quiet");
  context.strokeStyle = colour("line");
  context.beginPath();
  for (const at of time.at) line(context, Math.round(x(at)) + 0.5, 4, AXIS);
  context.stroke();
  const bounds = new Map((analysis?.steps ?? []).map((step) => [step.step, Math.max(0, ...Object.values(step.bounds_s)) * 1e6]));
  const steps = summary.marks.steps;
  const pixel = (to - from) / (width - GUTTER);
  let last = -1e9;
  steps.forEach(([step, start, end], at) => {
    if (end < from || start > to || end - start < pixel * 1.2) return;
    const left = Math.max(x(start), GUTTER), right = Math.min(x(end), width);
    context.fillStyle = colour(at % 2 ? "line" : "panel");
    context.fillRect(left, AXIS, right - left, STEPS - 3);
    const bound = bounds.get(step);
    if (bound) {
      context.fillStyle = colour("good");
      context.fillRect(left, AXIS + STEPS - 6, Math.max(Math.min(x(start + bound), right) - left, 0), 3);
    }
    const name = right - left > 52 ? `step ${step}` : `${step}`;
    context.font = SMALL;
    const wide = context.measureText(name).width;
    if (wide + 6 <= right - left || left - last > wide + 10) {
      text(context, name, left + 4, AXIS + 11.5, SMALL, "quiet");
      last = left + wide;
    }
  });
  last = -1e9;
  for (const [version, , at] of summary.marks.versions) {
    const place = x(at);
    const name = `v${version}`;
    if (place < GUTTER || place > width || place - last < 34) continue;
    context.strokeStyle = colour("version");
    context.beginPath();
    line(context, Math.round(place) + 0.5, HEAD - VERSIONS, HEAD);
    context.stroke();
    text(context, name, place + 3, HEAD - 4, SMALL, "version");
    last = place;
  }
  context.restore();
  context.strokeStyle = colour("line");
  context.beginPath();
  context.moveTo(0, HEAD - 0.5);
  context.lineTo(width, HEAD - 0.5);
  context.stroke();
  text(context, "time", 14, 15, SMALL, "faint");
  text(context, "steps", 14, AXIS + 11.5, SMALL, "faint");
  text(context, "weights", 14, HEAD - 4, SMALL, "faint");
}

function text(context, content, x, y, font, name, room) {
  context.font = font;
  context.fillStyle = colour(name);
  if (room && context.measureText(content).width > room) clipText(context, content, x, y, room);
  else context.fillText(content, x, y);
}

function line(context, x, top, bottom) {
  context.moveTo(x, top);
  context.lineTo(x, bottom);
}
