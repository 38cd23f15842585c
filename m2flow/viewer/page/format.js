// Numbers as people read them.

export const count = (value) => (value === null || value === undefined ? "" : Math.round(value).toLocaleString("en-US"));

export function compact(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  return number(value);
}

const trim = (value) => String(Number(value.toPrecision(3)));

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export const percent = (share) => (share === null || share === undefined ? "" : `${(share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0)}%`);

/** Microseconds, with three digits. */
export function micros(us) {
  if (us === null || us === undefined) return "";
  const size = Math.abs(us);
  if (size < 1000) return `${Math.round(us)} µs`;
  if (size < 1e6) return `${trim(us / 1e3)} ms`;
  return seconds(us / 1e6);
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${trim(value * 1e6)} µs`;
  if (size < 1) return `${trim(value * 1e3)} ms`;
  if (size < 60) return `${trim(value)} s`;
  const whole = Math.round(size);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

export function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return `${trim(value / size)} ${unit}`;
  return `${Math.round(value)} B`;
}

export const moment = (unix) => (unix ? new Date(unix * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "");

/** The clock of a schedule's axis: as many digits as the distance between two marks needs. */
export function clock(us, between) {
  if (between >= 60e6) {
    const whole = Math.round(us / 1e6);
    const text = `${Math.floor((whole % 3600) / 60)}:${String(whole % 60).padStart(2, "0")}`;
    return whole >= 3600 ? `${Math.floor(whole / 3600)}:${text.padStart(5, "0")}` : text;
  }
  if (between >= 1e6) return `${(us / 1e6).toFixed(0)} s`;
  if (between >= 1e3) return `${(us / 1e6).toFixed(between >= 1e5 ? 1 : between >= 1e4 ? 2 : 3)} s`;
  return `${(us / 1e3).toFixed(between >= 100 ? 1 : 3)} ms`;
}

/** Round distances so that about so many fit. */
export function marks(start, end, number) {
  const raw = (end - start) / Math.max(number, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1)));
  let between = [1, 2, 5, 10].map((by) => by * power).find((size) => size >= raw) ?? 10 * power;
  for (const size of [15e6, 30e6, 60e6, 120e6, 300e6, 600e6, 900e6, 1800e6, 3600e6, 7200e6]) if (raw > 10e6 && size >= raw) { between = size; break; }
  const found = [];
  for (let at = Math.ceil(start / between) * between; at <= end; at += between) found.push(at);
  return { between, at: found };
}
