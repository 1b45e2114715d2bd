// Formats numbers and times for people. Times are UTC.

const two = (number) => String(number).padStart(2, "0");

export function clock(minute) {
  const date = new Date(minute * 60_000);
  return `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}`;
}

// As the API and the command line accept it.
export const instant = (minute) => `${new Date(minute * 60_000).toISOString().slice(0, 16)}Z`;

export const time = (atMs) => new Date(atMs).toISOString();

export function seconds(atMs) {
  const date = new Date(atMs);
  return `${two(date.getUTCHours())}:${two(date.getUTCMinutes())}:${two(date.getUTCSeconds())}`;
}

export function duration(millis) {
  if (millis === null || millis === undefined) return "unknown";
  if (millis < 10) return `${millis.toFixed(1)} ms`;
  if (millis < 1000) return `${Math.round(millis)} ms`;
  if (millis < 60_000) return `${(millis / 1000).toFixed(millis < 10_000 ? 2 : 1)} s`;
  if (millis < 3_600_000) return `${(millis / 60_000).toFixed(1)} min`;
  return `${(millis / 3_600_000).toFixed(1)} h`;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export function share(part) {
  if (part === 0) return "0 %";
  if (part < 0.0001) return "< 0.01 %";
  return `${(part * 100).toFixed(part < 0.1 ? 2 : 1)} %`;
}

export function size(bytes) {
  const power = bytes < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
