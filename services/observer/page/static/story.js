// The story of one event: asks the observer for it, and draws it as a timeline.

import { element, find } from "./dom.js";
import { count } from "./format.js";

const STATES = {
  delivered: "good", dead: "bad", dropped: "bad", skipped: "bad", waiting: "warn", parked: "warn", unknown: "warn", not_read: "quiet",
  not_passed: "quiet", filtered: "quiet", redriven: "warn", discarded: "quiet",
};
let asked = 0;

function timeline(history) {
  return element("ol", { class: "timeline" }, ...history.map((moment) => element("li", {},
    element("time", { datetime: moment.at }, moment.at), " ", moment.text,
    ...(moment.position ? [" ", element("code", {}, moment.position)] : []))));
}

function lane(one) {
  return element("div", { class: "lane" },
    element("h5", {}, one.destination, " ", element("span", { class: `badge ${STATES[one.state] ?? "quiet"}` }, one.state.replace("_", " "))),
    element("p", {}, one.now), timeline(one.state === "delivered" && one.history.length < 2 ? [] : one.history));
}

// Of dead letters, the timeline has the times.
function reportedAt(passage) {
  return passage.outcome === "dead" ? null : passage.at;
}

function transform(passage) {
  return element("div", { class: "lane" },
    element("h5", {}, "transform ", element("span", { class: `badge ${passage.outcome === "dead" ? "bad" : passage.outcome === "passed" ? "good" : "quiet"}` }, passage.outcome ?? "unknown")),
    element("p", {}, passage.now, reportedAt(passage) ? `, reported ${passage.at}` : ""), timeline(passage.history));
}

function drawEvent(event) {
  const place = event.stream === null ? "its own record was not found"
    : `${event.stream}, partition ${event.partition}, offset ${event.offset}`;
  const by = event.made_by ? `, made by the transform of ${event.made_by}` : event.copied_by.length ? `, written by ${event.copied_by.join(" or ")}` : "";
  const copy = event.copy > 1 ? `, copy ${event.copy}${event.redriven ? `, redriven at ${event.redriven}` : ""}` : "";
  return element("article", {},
    element("h4", {}, event.accepted ? `Accepted ${event.accepted}` : "Accepted at an unknown time"),
    element("p", {}, place + by + copy),
    element("p", { class: "hint" }, `event time ${event.event_time ?? "unknown"}, ${event.bytes === null ? "unknown size" : `${count(event.bytes)} bytes`}, origin ${event.origin ?? "none"}`),
    ...(event.pipes.length || event.stream === null ? [] : [element("p", {}, "No pipe reads this stream.")]),
    ...event.pipes.map((pipe) => element("section", {}, element("h4", {}, pipe.pipe),
      ...(pipe.transform ? [transform(pipe.transform)] : []), ...pipe.destinations.map(lane))));
}

function isReported(pipe) {
  return Boolean(pipe.transform && reportedAt(pipe.transform)) || pipe.destinations.some((one) => one.history.some((moment) => ["delivered", "reported"].includes(moment.what)));
}

function notes(said) {
  const partly = said.searched.topics.filter((topic) => !topic.complete);
  const lines = partly.map((topic) => `${topic.topic} was searched ${topic.back_to ? `back to ${topic.back_to}` : "in part"}; older records may exist.`);
  const named = said.events.some((event) => event.origin !== null); // reports name no others
  if (named && !said.searched.reports_complete) {
    lines.push("The reports of this time are not stored any more, or were not read in full. Deliveries may be unknown.");
  }
  if (said.events.some((event) => event.pipes.some(isReported))) lines.push("A reported time is about a second after the answer, at most.");
  return lines.map((line) => element("p", { class: "hint" }, line));
}

function draw(place, said, searchMore) {
  const { searched } = said;
  if (said.events.length) return place.replaceChildren(...said.events.map(drawEvent), ...notes(said));
  place.replaceChildren(
    element("p", {}, `Not found among the events that were accepted from ${searched.from} to ${searched.until}. ${count(searched.records)} records were searched.`),
    ...notes(said), element("p", {}, element("button", { type: "button", class: "plain", onclick: searchMore }, "Search the last 7 days")));
}

// range: since and until, as the API accepts them; {}: the API's choice.
export async function showStory(id, range = {}) {
  const dialog = find("story"), place = find("story-text"), mine = ++asked;
  find("story-title").textContent = `Event ${id}`;
  place.replaceChildren(element("p", { class: "hint" }, "Searching…"));
  if (!dialog.open) dialog.showModal();
  try {
    if (id === "." || id === "..") throw new Error("no browser can request this id");
    const answer = await fetch(`/v1/events/${encodeURIComponent(id)}?${new URLSearchParams(range)}`);
    const said = await answer.json();
    if (!answer.ok) throw new Error(`${said.title}. ${said.detail}`);
    if (mine === asked) draw(place, said, () => showStory(id, { since: "7d" }));
  } catch (error) {
    if (mine !== asked) return;
    place.replaceChildren(element("p", {}, `Could not find out: ${error.message} Try: penstock event ID`));
  }
}

export function listenForSearch() {
  find("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const id = find("search-id").value.trim();
    if (id) showStory(id);
  });
}
