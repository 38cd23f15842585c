// Colours: Okabe and Ito's for calls, which colour-blind readers can tell apart; hatching besides for idle time, so that no cause is told by colour alone.

let read = new Map();
const number = 8;

export function refreshColours() {
  read = new Map();
  swatches.clear();
}

export function colour(name) {
  if (!read.has(name)) read.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return read.get(name);
}

const UNKNOWN = { label: "work", line: "", text: "", group: "wait" };

/** A kind of work. Spans of a run that goes on may be of one that its summary does not have yet. */
export const kindOf = (kinds, at) => kinds[at] ?? UNKNOWN;

/** The fill of a kind of work, and the ink that can be read on it. */
export function ofKind(kinds, at) {
  const kind = kindOf(kinds, at);
  if (kind.group === "wait") return { fill: colour("wait"), ink: colour("ink") };
  if (kind.group === "machinery") return { fill: colour(/^weights|probe$/.test(kind.label) ? "version" : "machinery"), ink: colour("page") };
  const place = kinds.slice(0, at).filter((other) => other.group === "call").length % number;
  return { fill: colour(`c${place}`), ink: colour(`on${place}`) };
}

const CAUSES = {
  tail: { colour: "c3", mark: "diagonal", means: "some samples still run elsewhere; this device has none left" },
  rollout: { colour: "c0", mark: "dots", means: "training waits for samples; every instance generates" },
  staleness: { colour: "c4", mark: "rising", means: "the next generation may not begin before training is done" },
  reward: { colour: "c2", mark: "grid", means: "waits for rewards or ops" },
  barrier: { colour: "faint", mark: "level", means: "waits for the program, or for other devices of its kind" },
  backpressure: { colour: "c6", mark: "grid", means: "the room for samples under way is used up" },
  switch: { colour: "machinery", mark: "rising", means: "another engine takes the device" },
  sync: { colour: "version", mark: "diagonal", means: "weights are on their way" },
  tool: { colour: "c5", mark: "upright", means: "all of its episodes wait for tools or agents" },
  unused: { colour: "wait", mark: "dots", means: "nobody has this device" },
  failed: { colour: "bad", mark: "grid", means: "the device has failed" },
  setup: { colour: "faint", mark: "diagonal", means: "before the first step: loading, and what the flow does before its loop" },
  evaluation: { colour: "c5", mark: "dots", means: "an evaluation is worked on, and nothing else" },
  host: { colour: "c1", mark: "upright", means: "has samples, and Python works between two decode steps" },
};

export const meaning = (cause) => CAUSES[cause]?.means ?? "";

const swatches = new Map();

/** A hatched fill for idle time. */
export function ofCause(context, cause) {
  if (!swatches.has(cause)) swatches.set(cause, context.createPattern(tile(cause), "repeat"));
  return swatches.get(cause);
}

function tile(cause) {
  const { colour: name, mark } = CAUSES[cause] ?? CAUSES.barrier;
  const size = 6 * 2;
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  context.globalAlpha = 0.16;
  context.fillStyle = colour(name);
  context.fillRect(0, 0, size, size);
  context.globalAlpha = 0.62;
  context.strokeStyle = colour(name);
  context.lineWidth = 1.1;
  context.beginPath();
  const lines = {
    diagonal: [[0, 0, size, size], [-6, 6, 6, 18], [6, -6, 18, 6]],
    rising: [[0, size, size, 0], [-6, 6, 6, -6], [6, 18, 18, 6]],
    level: [[0, 3.5, size, 3.5], [0, 9.5, size, 9.5]],
    upright: [[3.5, 0, 3.5, size], [9.5, 0, 9.5, size]],
    grid: [[0, 3.5, size, 3.5], [3.5, 0, 3.5, size], [0, 9.5, size, 9.5], [9.5, 0, 9.5, size]],
    dots: [],
  }[mark];
  for (const [x0, y0, x1, y1] of lines) {
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
  }
  context.stroke();
  if (mark === "dots") {
    context.fillRect(2, 2, 2, 2);
    context.fillRect(8, 8, 2, 2);
  }
  return canvas;
}

/** A little picture of a cause for a legend, or a strip of it so many pixels wide. */
export function causeSwatch(cause, width = 12, height = 12) {
  const canvas = document.createElement("canvas");
  canvas.className = "swatch";
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  context.fillStyle = context.createPattern(tile(cause), "repeat");
  context.fillRect(0, 0, width, height);
  canvas.setAttribute("aria-hidden", "true");
  return canvas;
}

export function kindSwatch(kinds, at) {
  const made = document.createElement("i");
  made.className = "swatch";
  made.style.background = ofKind(kinds, at).fill;
  return made;
}
