// Numbers as people read them: the same rules as app/admin/numbers.py, for what the server sends raw.

export function count(value) {
  if (value < 10_000) return Math.round(value).toLocaleString("en-US");
  for (const [limit, divisor, unit] of [[1e6, 1e3, "k"], [1e9, 1e6, "M"]]) {
    if (value < 0.9995 * limit) return `${short(value / divisor)}${unit}`;
  }
  return `${short(value / 1e9)}G`;
}

function short(value) {
  return String(Number(value.toPrecision(3)));
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let value = bytes;
  for (const unit of units) {
    if (value < 1000) return unit === "B" ? `${Math.round(value)} B` : `${short(value)} ${unit}`;
    value /= 1024;
  }
  return `${short(value)} TiB`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.trunc(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.trunc(whole / 60)} min`;
  if (whole < 172_800) return `${Math.trunc(whole / 3600)} h`;
  return `${Math.trunc(whole / 86_400)} d`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 999.5) return value < 9.95 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`;
  const seconds = value / 1000;
  return seconds < 9.995 ? `${seconds.toFixed(2)} s` : `${Math.round(seconds)} s`;
}

export function gigabytes(perSecond) {
  const value = perSecond / 1e9;
  if (value === 0) return "0 GB/s";
  return `${value < 0.001 ? "<0.001" : Number(value.toPrecision(2))} GB/s`;
}

export function percent(part, whole) {
  if (!(whole > 0) || !(part > 0)) return 0;
  return part >= whole ? 100 : Math.min(99, Math.max(1, Math.round((100 * part) / whole)));
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

export function moment(unixSeconds) {
  const date = new Date(unixSeconds * 1000);
  const isToday = date.toDateString() === new Date().toDateString();
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return isToday ? time : `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })}, ${time}`;
}

export function words(name) {
  return name.replaceAll("_", " ");
}

export const TIERS = ["hbm", "dram", "nvme"];
export const TIER_NAMES = { hbm: "HBM", dram: "DRAM", nvme: "NVMe" };
