// The page: receives each whole view from the stream and draws the chosen pipe. A person's choices stay.

import { drawDurations, drawLag, drawShares } from "./charts.js";
import { element, find } from "./dom.js";
import { clock, count, duration, instant, seconds, share, size, time } from "./format.js";
import { listenForSearch, showStory } from "./story.js";
import { drawDestinations, drawFields, drawGroups, drawLoss, drawMissing, drawScaling, drawShards } from "./tables.js";

const STALE_MS = 20_000;
const opened = new Map(); // by pipe: the destinations whose causes are unfolded
let view = null, lastMessage = 0, drawn = null, asked = 0, tabs = "";

function wanted() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return null; // a person can write any hash
  }
}

const chosen = () => view.pipes.find((pipe) => pipe.name === wanted()) ?? view.pipes[0];

function choose(name, focus) {
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  draw();
  if (focus) find("pipes").querySelector('[aria-selected="true"]').focus();
}

function drawTabs() {
  const current = chosen(), looks = JSON.stringify([current?.name, view.pipes.map((pipe) => [pipe.name, pipe.health])]);
  if (tabs === looks) return; // a tab that is replaced while it is pressed receives no click
  tabs = looks;
  const focused = find("pipes").contains(document.activeElement);
  const buttons = view.pipes.map((pipe) => element("button", {
    role: "tab", type: "button", "aria-selected": String(pipe === current), "aria-controls": "pipe", tabindex: pipe === current ? 0 : -1,
    onclick: () => choose(pipe.name),
  }, element("span", { class: "name" }, pipe.name), element("span", { class: `badge ${pipe.health}` }, pipe.health)));
  find("pipes").replaceChildren(...buttons);
  if (focused) find("pipes").querySelector('[aria-selected="true"]').focus();
}

function onKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const busy = event.target.closest("dialog, .scroll, input, textarea") || event.altKey || event.ctrlKey || event.metaKey;
  if (!step || busy || !view?.pipes.length) return;
  const at = view.pipes.indexOf(chosen());
  event.preventDefault();
  choose(view.pipes[(at + step + view.pipes.length) % view.pipes.length].name, find("pipes").contains(document.activeElement));
}

function drawSummary(pipe) {
  find("name").textContent = pipe.name;
  find("health").replaceChildren(element("span", { class: `badge ${pipe.health}` }, pipe.health));
  find("reasons").replaceChildren(...pipe.reasons.map((reason) => element("li", {}, reason)));
  const final = pipe.loss.filter((row) => row.state === "final" || row.loss > 0);
  const accepted = final.reduce((sum, row) => sum + row.accepted, 0), lag = pipe.lag.at(-1);
  const lost = final.reduce((sum, row) => sum + row.loss * row.accepted, 0);
  const figures = [
    ["events a second", count(pipe.per_second)],
    ["lost, as far as it is final", final.length ? `${count(lost)} of ${count(accepted)} (${share(accepted ? lost / accepted : 0)})` : "none is final yet"],
    ["end to end P95", lag ? duration(lag.p95) : "unknown"],
  ];
  find("figures").replaceChildren(...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// Untrusted text: the address of Spark's pages, from a report. Only a web address becomes a link.
function drawTransform(one) {
  find("transform-section").hidden = !one;
  if (!one) return;
  const link = find("spark-ui"), isWeb = /^https?:\/\//.test(one.ui);
  find("spark-ui-line").hidden = !isWeb;
  if (isWeb && link.textContent !== one.ui) { // a link that is replaced while it is pressed receives no click
    link.href = one.ui;
    link.textContent = one.ui;
  }
  const figures = [
    ["input, events a second", count(one.per_second)],
    ["mode", one.real_time ? "real-time" : "micro-batches"],
    ...(one.real_time ? [] : [ // there a batch lasts from one commit to the next, and no event waits for its end
      ["batch time, mean", one.batch_ms === null ? "no batch" : duration(one.batch_ms)],
      ["longest batch", one.batch_ms === null ? "" : duration(one.longest_ms)],
      ["batches a second", one.batches_per_second.toFixed(1)],
    ]),
    ["event age at the output, P95", duration(one.lag_p95_ms)],
    ["behind", one.behind_ms === 0 ? "0" : duration(one.behind_ms)],
    ...(one.state_rows ? [["rows of state", count(one.state_rows)], ["size of state", size(one.state_bytes)]] : []),
    ...(one.executors ? [["executors", count(one.executors)]] : []),
  ];
  find("transform").replaceChildren(...figures.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value))));
}

async function explain(pipe, minute) {
  const dialog = find("missing"), list = find("missing-list"), mine = ++asked;
  find("missing-title").textContent = `Missing of ${pipe.name} at ${clock(minute)} UTC`;
  list.replaceChildren(element("p", { class: "hint" }, "Looking…"));
  dialog.showModal();
  try {
    const answer = await fetch(`/v1/pipes/${encodeURIComponent(pipe.name)}/loss/${encodeURIComponent(instant(minute))}/explain`);
    const said = await answer.json();
    if (!answer.ok) throw new Error(`${said.title}. ${said.detail}`);
    if (mine !== asked) return;
    const range = { since: instant(minute - 2), until: instant(minute + 5) };
    drawMissing(list, said, (id) => showStory(id, range));
  } catch (error) {
    if (mine !== asked) return;
    list.replaceChildren(element("p", {}, `Could not find out: ${error.message}. Try: penstock loss explain ${pipe.name} ${instant(minute)}`));
  }
}

// The newest event that failed so. It was accepted before it failed first.
function showNewest(cause) {
  const range = { since: time(cause.last_ms - 3_600_000), until: time(cause.last_ms) };
  showStory(cause.event_id, range);
}

// Untrusted text: who announced it. `element` makes text nodes of it.
function drawPlanned(pipe) {
  const mine = view.planned.filter((one) => one.pipe === null || one.pipe === pipe?.name);
  find("planned").replaceChildren(...mine.map((one) => element("li", {},
    `Planned ${one.kind} ${one.pipe === null ? "of all pipes" : `of ${one.pipe}`} until ${seconds(one.until_ms)}, by ${one.who}: loss raises no alarm. penstock planned cancel ${one.id}`)));
}

function draw() {
  const pipe = view.pipes.length ? chosen() : null;
  find("empty").hidden = Boolean(pipe);
  find("content").hidden = !pipe;
  drawTabs();
  drawPlanned(pipe);
  if (!pipe) return;
  if (drawn !== null && drawn !== pipe.name) getSelection().removeAllRanges(); // selected tables are not drawn again
  drawn = pipe.name;
  if (!opened.has(pipe.name)) opened.set(pipe.name, new Set());
  document.title = `${pipe.name} · ${pipe.health} · Penstock`;
  drawSummary(pipe);
  drawTransform(pipe.transform);
  drawLag(find("lag"), pipe.lag);
  drawDurations(find("durations"), pipe.steps, pipe.durations);
  drawShares(find("shares"), pipe.steps, pipe.durations.at(-1));
  drawLoss(find("loss"), pipe, view.threshold, (minute) => explain(pipe, minute));
  drawDestinations(find("destinations"), pipe, opened.get(pipe.name), showNewest);
  drawFields(find("fields"), pipe);
  drawShards(find("shards"), pipe);
  drawGroups(find("groups"), view.groups);
  find("scaling-section").hidden = !view.scaling.length;
  drawScaling(find("scaling"), view.scaling, view.at_ms);
}

function tell() {
  const status = find("connection"), isLive = view && Date.now() - lastMessage < STALE_MS;
  const state = isLive ? "live" : "waiting";
  const text = !view ? "connecting" : `${isLive ? (view.catching_up ? "catching up" : view.speaks ? "live" : "live, stands by") : "no word from the observer since"} ${seconds(view.at_ms)}`;
  if (status.dataset.state !== state) status.dataset.state = state;
  if (status.textContent !== text) status.textContent = text;
}

function connect() {
  const stream = new EventSource("/v1/stream");
  stream.addEventListener("view", (event) => {
    view = JSON.parse(event.data);
    lastMessage = Date.now();
    draw();
    tell();
  });
  stream.addEventListener("error", () => {
    if (stream.readyState !== EventSource.CLOSED) return; // it connects again by itself
    setTimeout(connect, 2000);
  });
}

function skip(event) {
  event.preventDefault(); // the hash is the pipe's name
  find("pipe").focus();
}

let waiting = 0;
find("skip").addEventListener("click", skip);
addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(() => view && draw()); });
addEventListener("hashchange", () => view && draw());
addEventListener("keydown", onKey);
listenForSearch();
setInterval(tell, 1000);
connect();
