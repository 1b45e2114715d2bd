// The loss table, the destinations, the groups.

import { element } from "./dom.js";
import { clock, count, duration, seconds, share } from "./format.js";

const OLD_DECISION_MS = 300_000;
const BREAKERS = { closed: "good", "half-open": "warn", open: "bad" };

// Returns a function that restores the focus after the rows of the table were replaced.
function holdFocus(table) {
  const active = document.activeElement, row = table.contains(active) ? active.closest("tbody tr") : null;
  if (!row) return () => {};
  const focusable = (one) => [...one.querySelectorAll("button, summary")];
  const name = row.cells[0].textContent, at = focusable(row).indexOf(active);
  return () => focusable([...table.tBodies[0].rows].find((one) => one.cells[0].textContent === name) ?? row)[at]?.focus({ preventScroll: true });
}

function isBeingCopied(table) {
  const selection = getSelection();
  return !selection.isCollapsed && table.contains(selection.anchorNode);
}

// texts: the columns with words, aligned left; the others have numbers, aligned right.
function fill(table, caption, heads, rows, texts = []) {
  if (isBeingCopied(table)) return;
  const focus = holdFocus(table);
  const cells = heads.map((head) => element("th", { scope: "col", class: texts.includes(head) ? "text" : null }, head));
  const head = element("thead", {}, element("tr", {}, ...cells));
  table.replaceChildren(element("caption", {}, caption), head, element("tbody", {}, ...rows));
  focus();
}

function lossCell(cell, accepted, threshold, explain) {
  const part = accepted ? cell.missing / accepted : 0;
  const text = cell.missing ? `${count(cell.missing)} (${share(part)})` : "0";
  if (cell.state === "open") return element("td", { class: "open" }, cell.missing ? `${count(cell.missing)} open` : "0");
  if (cell.state === "unknown") return element("td", { class: "behind", title: "the minute was forgotten before their outcome was known" }, `${count(cell.missing)} unknown`);
  if (cell.state === "behind") return element("td", { class: "behind", title: "the node has older events to process" }, `${count(cell.missing)} behind`);
  if (!cell.missing) return element("td", { class: "none" }, "0");
  const button = element("button", { type: "button", title: "Which ones?", onclick: explain }, text);
  return element("td", { class: part > threshold ? "lost" : "some" }, button);
}

export function drawLoss(table, pipe, threshold, explain) {
  const rows = [...pipe.loss].reverse().map((row) => {
    const isFinal = row.state === "final", known = isFinal || row.loss > 0;
    const whole = known ? (row.loss > threshold ? "lost" : row.loss ? "some" : "none") : row.state === "unknown" ? "behind" : row.state;
    return element("tr", {},
      element("th", { scope: "row" }, clock(row.minute)),
      element("td", {}, count(row.accepted)),
      ...row.cells.map((cell) => lossCell(cell, row.accepted, threshold, () => explain(row.minute))),
      element("td", { class: whole }, known ? share(row.loss) + (isFinal ? "" : ` (${row.state})`) : row.state),
      element("td", { class: "late" }, row.late ? count(row.late) : ""));
  });
  fill(table, `Loss of ${pipe.name} by minute`, ["Minute", "Accepted", ...pipe.nodes.map((node) => `missing at ${node}`), "End to end", "Settled late"], rows);
}

function causes(destination, opened, show) {
  if (!destination.causes.length) return "";
  const [first, ...more] = destination.causes;
  const line = (cause) => `${cause.reason} · ${count(cause.count)} · last ${seconds(cause.last_ms)}`;
  const newest = (cause) => (cause.event_id === null ? [] : [" ", element("button", { type: "button", title: `The story of ${cause.event_id}`, onclick: () => show(cause) }, "newest event")]);
  if (!more.length) return element("span", {}, line(first), ...newest(first));
  const toggle = (event) => (event.target.open ? opened.add(destination.name) : opened.delete(destination.name));
  return element("details", { open: opened.has(destination.name), ontoggle: toggle },
    element("summary", {}, line(first)), element("ul", {},
      ...newest(first).length ? [element("li", {}, first.reason, ...newest(first))] : [],
      ...more.map((cause) => element("li", {}, line(cause), ...newest(cause)))));
}

export function drawDestinations(table, pipe, opened, show) {
  const skips = pipe.destinations.some((one) => one.skipped);
  const filters = pipe.destinations.some((one) => one.filtered);
  const rows = pipe.destinations.map((one) => element("tr", {},
    element("th", { scope: "row" }, one.name),
    element("td", { class: "text" }, one.state),
    element("td", { class: "text" }, element("span", { class: `badge ${BREAKERS[one.breaker] ?? "quiet"}` }, one.breaker)),
    ...[one.delivered, one.retrying, one.parked, one.dead, ...(skips ? [one.skipped] : []), ...(filters ? [one.filtered] : [])].map((number) => element("td", {}, count(number))),
    element("td", { class: "text wrap" }, causes(one, opened, show))));
  fill(table, `Destinations of ${pipe.name}`, ["Destination", "State", "Breaker", "Delivered", "Retrying", "Parked", "Dead", ...(skips ? ["Skipped"] : []), ...(filters ? ["Filtered"] : []), "Common failures"], rows,
    ["State", "Breaker", "Common failures"]);
}

export function drawGroups(table, groups) {
  const rows = groups.map((group) => element("tr", {},
    element("th", { scope: "row" }, group.service),
    element("td", {}, count(group.instances)),
    element("td", {}, duration(group.behind_ms))));
  fill(table, "Groups of instances", ["Service", "Instances", "Behind"], rows);
}

// Untrusted text: the reason of a freeze, names of instances, keys of events. `element` makes text nodes of it.
function scalingNotes(one) {
  const found = [["", one.frozen], ...one.failed.map((text) => ["failed: ", text]), ["hot: ", one.hot]];
  const notes = found.filter(([, text]) => text && !one.words.includes(text)).map(([kind, text]) => kind + text); // once is enough
  return notes.length ? element("ul", {}, ...notes.map((text) => element("li", {}, text))) : "";
}

export function drawScaling(table, reports, now) {
  const rows = reports.map((one) => {
    const isOld = now - one.at_ms > OLD_DECISION_MS, changes = one.wanted !== one.size;
    const state = one.frozen ? ["warn", "frozen"] : one.failed.length ? ["bad", "failed"] : one.hot ? ["warn", "hot"] : ["good", "ok"];
    return element("tr", {},
      element("th", { scope: "row" }, one.group),
      element("td", { class: "text" }, element("span", { class: `badge ${state[0]}` }, state[1])),
      element("td", {}, `${count(one.working)} of ${count(one.size)}`),
      element("td", { class: changes ? "some" : null }, count(one.wanted)),
      element("td", { class: "text wrap" }, `${one.dry_run ? "dry run: " : ""}${one.action}: ${one.words}`),
      element("td", { class: "text wrap" }, scalingNotes(one)),
      element("td", { class: isOld ? "lost" : null, title: isOld ? "the autoscaler has not decided since" : null }, seconds(one.at_ms)));
  });
  fill(table, "Instances by group", ["Group", "State", "Working", "Wanted", "Decision", "Also", "At"], rows,
    ["State", "Decision", "Also"]);
}

export function drawFields(table, pipe) {
  const rows = pipe.fields.map((one) => element("tr", {},
    element("th", { scope: "row" }, one.name),
    element("td", { class: "text" }, one.step),
    element("td", {}, share(one.present)),
    element("td", {}, share(one.nulls)),
    element("td", {}, count(one.distinct)),
    element("td", {}, one.mean === null ? "" : one.mean.toLocaleString("en", { maximumSignificantDigits: 4 })),
    element("td", { class: one.drift ? "text wrap lost" : "text" }, one.drift)));
  fill(table, `Payload fields of ${pipe.name}`, ["Field", "At", "Present", "Null", "Different values", "Mean", "Changed"], rows, ["At", "Changed"]);
}

export function drawShards(table, pipe) {
  const rows = pipe.shards.map((one) => element("tr", {},
    element("th", { scope: "row" }, one.topic),
    element("td", { class: "text" }, one.group),
    element("td", {}, count(one.partitions)),
    element("td", {}, one.furthest === null ? "" : `${one.furthest}`),
    element("td", {}, count(one.records)),
    element("td", {}, one.millis ? duration(one.millis) : "0")));
  fill(table, `Shards of ${pipe.name}`, ["Topic", "Group", "Partitions", "Furthest behind", "Records behind", "Oldest"], rows, ["Group"]);
}

// show: opens the story of an event id.
export function drawMissing(place, said, show) {
  const table = element("table");
  const rows = said.named.map((one) => element("tr", {}, element("th", { scope: "row" }, one.origin),
    element("td", { class: "text" }, one.event_id === null ? "not found" : element("button", { type: "button", title: "Its story", onclick: () => show(one.event_id) }, one.event_id)),
    ...[one.destination ? `${one.missing_at} to ${one.destination}` : one.missing_at, one.seen_by, one.topic ?? "", one.partition ?? "", one.offset ?? ""]
      .map((text) => element("td", { class: "text" }, text))));
  fill(table, "Missing events", ["Origin", "Event id", "Missing at", "Last seen by", "Topic", "Partition", "Offset"], rows,
    ["Event id", "Missing at", "Last seen by", "Topic", "Partition", "Offset"]);
  const more = said.missing - said.named.length;
  place.replaceChildren(element("div", { class: "scroll" }, table), ...(more > 0 ? [element("p", { class: "hint" }, `and ${count(more)} more`)] : []));
}
