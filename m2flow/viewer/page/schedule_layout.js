// Where each lane stands, from top to bottom; pixels of the content, which scrolls under the axis.

export const GUTTER = globalThis.innerWidth < 640 ? 96 : 178; // On a phone, lanes need the room.
export const AXIS = 24;
export const STEPS = 19;
export const VERSIONS = 15;
export const HEAD = AXIS + STEPS + VERSIONS;
const WORK = 24;
const MORE = 11;
const RUNNING = 26;
const LIFE = 6; // At most; less where many samples run at once.
const LEAST_LIFE = 1.5;
const LIVES = 230;
const WAIT = 4;
const PLAN = 26;
const GAP = 12;
const LEAST = 40;
const MOST_LIVES = 128;

/** Lanes grow where there is room for it. */
export function layout(summary, expanded, room) {
  const least = lay(summary, expanded, 1);
  const growth = room > least.height ? Math.min(1.7, room / least.height) : 1;
  return growth > 1.05 ? lay(summary, expanded, growth) : least;
}

function lay(summary, expanded, growth) {
  const work = Math.round(WORK * growth), running = Math.round(RUNNING * growth * growth);
  const lanes = [];
  let y = 8;
  if (summary.predicted && summary.marks.steps.length) {
    lanes.push({ kind: "plan", name: "plan", top: y, height: PLAN });
    y += PLAN + GAP;
  }
  summary.lanes.forEach((lane, at) => {
    const found = { kind: "lane", at, name: lane.name, lane, top: y, work: [], spans: [] };
    const numWork = Math.max(lane.num_rows.work, lane.device ? 1 : 0);
    for (let row = 0; row < numWork; row++) {
      found.work.push([y, row ? MORE - 2 : work]);
      y += row ? MORE : work + 1;
    }
    if (lane.num_rows.wait) {
      found.wait = [y + 1, WAIT];
      y += WAIT + 3;
    }
    if (lane.num_rows.life) {
      found.running = [y + 3, running];
      y += running + 4;
      found.isExpanded = expanded.has(at);
      if (found.isExpanded) {
        const number = Math.min(lane.num_rows.life, MOST_LIVES);
        const tall = Math.min(Math.max((LIVES * growth) / number, LEAST_LIFE), LIFE);
        for (let row = 0; row < number; row++) {
          found.spans.push([y, tall > 3 ? tall - 1 : tall]);
          y += tall;
        }
      }
    }
    y = Math.max(y, found.top + LEAST) + Math.round((growth - 1) * GAP);
    found.height = y - found.top;
    y += GAP;
    lanes.push(found);
  });
  return { lanes, height: y + 8 };
}
