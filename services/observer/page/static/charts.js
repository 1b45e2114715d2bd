// Three charts as SVG: lines over time, stacked areas over time, a ring of shares.

import { element, shape } from "./dom.js";
import { clock, duration, share } from "./format.js";

const HEIGHT = 190, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;

// 3 to 5 round numbers from 0 to at least `most`.
function ticks(most) {
  const rough = Math.max(most, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
  return Array.from({ length: Math.ceil(Math.max(most, 1e-9) / step) + 1 }, (_, index) => index * step);
}

class Frame {
  constructor(figure, minutes, most) {
    this.width = Math.max(figure.clientWidth - 34, 220);
    this.minutes = minutes;
    this.marks = ticks(most);
    this.top = this.marks.at(-1);
    const first = minutes[0] ?? 0, span = Math.max(1, (minutes.at(-1) ?? 1) - first);
    this.x = (minute) => LEFT + ((minute - first) / span) * (this.width - LEFT - RIGHT);
    this.y = (value) => TOP + (1 - value / this.top) * (HEIGHT - TOP - BOTTOM);
  }

  axes() {
    const found = this.marks.flatMap((mark) => [
      shape("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(mark), y2: this.y(mark) }),
      shape("text", { x: LEFT - 6, y: this.y(mark) + 4, "text-anchor": "end" }, mark === 0 ? "0" : duration(mark)),
    ]);
    const every = Math.max(1, Math.ceil(this.minutes.length / Math.max(2, Math.floor(this.width / 90))));
    for (let index = this.minutes.length - 1; index >= 0; index -= every) {
      const minute = this.minutes[index], x = this.x(minute);
      const anchor = x > this.width - RIGHT - 16 ? "end" : "middle";
      found.push(shape("text", { x, y: HEIGHT - 4, "text-anchor": anchor }, clock(minute)));
    }
    return found;
  }

  svg(label, drawn, tell) {
    const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    const move = (event) => {
      const box = made.getBoundingClientRect();
      const at = (event.clientX - box.left) * (this.width / box.width);
      const nearest = this.minutes.reduce((best, one) => (Math.abs(this.x(one) - at) < Math.abs(this.x(best) - at) ? one : best));
      for (const name of ["x1", "x2"]) cursor.setAttribute(name, this.x(nearest));
      cursor.setAttribute("visibility", "visible");
      tell(this.minutes.indexOf(nearest));
    };
    const leave = () => { cursor.setAttribute("visibility", "hidden"); tell(this.minutes.length - 1); };
    const listeners = this.minutes.length ? { onpointermove: move, onpointerleave: leave } : {};
    const made = shape("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "img", "aria-label": label, ...listeners },
      ...this.axes(), ...drawn, cursor);
    return made;
  }
}

const key = (index, text) => element("span", { class: `key s${index % 6}` }, text);

function show(figure, title, svg, caption) {
  figure.replaceChildren(element("h3", {}, title), svg, caption);
}

function none(figure, title) {
  figure.replaceChildren(element("h3", {}, title), element("p", { class: "empty" }, "No figures yet."));
}

// The points of a line; a single minute is a line across.
const across = (frame, points) => (points.length > 1 ? points : [[LEFT, points[0][1]], [frame.width - RIGHT, points[0][1]]]);
const path = (points, begin) => points.map(([x, y], index) => `${index ? "L" : begin}${x},${y}`).join("");

export function drawLag(figure, rows) {
  const title = "End to end, arrival to the receiver’s 2xx";
  if (!rows.length) return none(figure, title);
  const names = ["p99", "p95", "p50"], minutes = rows.map((row) => row.minute);
  const frame = new Frame(figure, minutes, Math.max(...rows.map((row) => row.p99)));
  const points = (name) => across(frame, rows.map((row) => [frame.x(row.minute), frame.y(row[name])]));
  const lines = names.map((name, index) =>
    shape("path", { class: `line s${index === 0 ? 5 : index - 1 ? 2 : 0}${name === "p95" ? "" : " thin"}`, d: path(points(name), "M") }));
  const caption = element("figcaption");
  const tell = (index) => caption.replaceChildren(element("span", { class: "time" }, `${clock(minutes[index])} UTC`),
    ...names.map((name, at) => key(at === 0 ? 5 : at - 1 ? 2 : 0, `${name.toUpperCase()} ${duration(rows[index][name])}`)));
  const last = rows.at(-1);
  const label = `Lag end to end over ${rows.length} minutes. Now: P50 ${duration(last.p50)}, P95 ${duration(last.p95)}, P99 ${duration(last.p99)}.`;
  show(figure, title, frame.svg(label, lines, tell), caption);
  tell(rows.length - 1);
}

export function drawDurations(figure, steps, rows) {
  const title = "What each step takes (median)";
  if (!rows.length) return none(figure, title);
  const minutes = rows.map((row) => row.minute);
  const totals = rows.map((row) => row.millis.reduce((sum, one) => sum + one, 0));
  const frame = new Frame(figure, minutes, Math.max(...totals));
  const below = rows.map(() => 0);
  const border = () => across(frame, rows.map((row, index) => [frame.x(row.minute), frame.y(below[index])]));
  const areas = steps.map((_, step) => {
    const lower = border().reverse();
    rows.forEach((row, index) => { below[index] += row.millis[step]; });
    return shape("path", { class: `area s${step % 6}`, d: `${path(border(), "M")}${path(lower, "L")}Z` });
  });
  const caption = element("figcaption");
  const tell = (index) => caption.replaceChildren(element("span", { class: "time" }, `${clock(minutes[index])} UTC`),
    ...steps.map((step, at) => key(at, `${step} ${duration(rows[index].millis[at])}`)));
  const label = `Duration of each step over ${rows.length} minutes. Now: ${steps.map((step, at) => `${step} ${duration(rows.at(-1).millis[at])}`).join(", ")}.`;
  show(figure, title, frame.svg(label, areas, tell), caption);
  tell(rows.length - 1);
}

export function drawShares(figure, steps, row) {
  const title = "Where the time goes now";
  const total = row ? row.millis.reduce((sum, one) => sum + one, 0) : 0;
  if (!total) return none(figure, title);
  const radius = 58, around = 2 * Math.PI * radius;
  let turned = 0;
  const rings = steps.map((_, step) => {
    const part = row.millis[step] / total;
    const ring = shape("circle", { class: `ring s${step % 6}`, cx: 85, cy: 85, r: radius, "stroke-width": 26,
      "stroke-dasharray": `${part * around} ${around}`, transform: `rotate(${turned * 360 - 90} 85 85)` });
    turned += part;
    return ring;
  });
  const words = steps.map((step, at) => `${step} ${share(row.millis[at] / total)}`);
  const svg = shape("svg", { viewBox: "0 0 170 190", height: HEIGHT, role: "img", "aria-label": `Shares of the time: ${words.join(", ")}.` },
    ...rings, shape("text", { class: "whole", x: 85, y: 90, "text-anchor": "middle" }, duration(total)));
  show(figure, title, svg, element("figcaption", {}, ...words.map((word, at) => key(at, word))));
}
