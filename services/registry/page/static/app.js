// The page: asks the API for the subjects, and for the versions and differences of the chosen one. Names are a client's own text:
// `element` makes text nodes of them, and nothing else.

const find = (id) => document.getElementById(id);
const AGAIN_MS = 10_000;
let subjects = [], chosen = null, asked = 0;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

async function ask(path, body) {
  const options = body ? { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } } : {};
  const answer = await fetch(path, options), said = await answer.json();
  if (!answer.ok) throw new Error(`${said.title}. ${said.detail}`);
  return said;
}

function head(...names) {
  return element("thead", {}, element("tr", {}, ...names.map(([name, kind]) => element("th", { scope: "col", class: kind }, name))));
}

function wanted() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return ""; // a person can write any hash
  }
}

function matches(one) {
  const text = find("filter-text").value.trim().toLowerCase();
  return [one.subject, one.latest.name, ...one.streams, ...one.pipes].some((name) => name.toLowerCase().includes(text));
}

function drawSubjects() {
  const rows = subjects.filter(matches).map((one) => element("tr", { "aria-current": one.subject === wanted() ? "true" : null },
    element("th", { scope: "row" }, element("button", { class: "link", type: "button", onclick: () => choose(one.subject) }, one.subject)),
    element("td", {}, one.latest.name),
    element("td", { class: "number" }, one.latest.version),
    element("td", { class: "number" }, one.latest.id),
    element("td", {}, one.own_level ? one.level : `${one.level} (default)`),
    element("td", { class: "wrap" }, one.streams.join(", ")),
    element("td", { class: "wrap" }, one.pipes.join(", ")),
    element("td", {}, ...(one.latest.deprecated ? [element("span", { class: "badge warn" }, "deprecated")] : []))));
  find("empty").hidden = subjects.length > 0;
  const columns = head(["subject"], ["type"], ["latest", "number"], ["id", "number"], ["level"], ["streams"], ["pipes"], [""]);
  find("subjects").replaceChildren(element("caption", {}, "Subjects"), columns, element("tbody", {}, ...rows));
}

function choose(name) {
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  drawSubjects();
  open();
}

function drawVersions() {
  const rows = chosen.versions.toReversed().map((one) => element("tr", {},
    element("th", { scope: "row", class: "number" }, element("button", { class: "link", type: "button", "aria-label": `Show version ${one.version}`, onclick: () => show(one.version) }, one.version)),
    element("td", { class: "number" }, one.id),
    element("td", {}, one.name),
    element("td", {}, one.registered),
    element("td", {}, element("code", { title: one.fingerprint }, one.fingerprint.slice(0, 12))),
    element("td", {}, one.protocol),
    element("td", { class: "wrap" }, ...(one.deprecated ? [element("span", { class: "badge warn" }, "deprecated"), ` ${one.note}`] : []))));
  const columns = head(["version", "number"], ["id", "number"], ["type"], ["registered"], ["fingerprint"], ["protocol"], [""]);
  find("versions").replaceChildren(element("caption", {}, "Versions"), columns, element("tbody", {}, ...rows));
}

function show(version) {
  find("shown").textContent = version;
  const text = chosen.versions[version - 1].schema;
  find("schema").textContent = JSON.stringify(JSON.parse(text), null, 2);
}

async function open() {
  const name = wanted(), mine = ++asked;
  find("subject").hidden = !name;
  if (!name) return;
  try {
    const said = await ask(`/v1/subjects/${encodeURIComponent(name)}`);
    if (mine !== asked) return;
    chosen = said;
  } catch (error) {
    find("subject").hidden = true;
    tell(`${name}: ${error.message}`);
    return;
  }
  document.title = `${chosen.subject} · Schemas · Penstock`;
  find("subject-name").textContent = chosen.subject;
  const used = [...chosen.streams.map((one) => `stream ${one}`), ...chosen.pipes.map((one) => `pipe ${one}`)];
  find("subject-about").textContent = `Level ${chosen.level}, mode ${chosen.mode}. Used by: ${used.join(", ") || "no stream of the pipe file"}.`;
  drawVersions();
  const last = chosen.versions.length;
  for (const [id, at] of [["from", Math.max(1, last - 1)], ["to", last]]) {
    find(id).replaceChildren(...chosen.versions.map((one) => element("option", { value: one.version, selected: one.version === at }, one.version)));
  }
  find("compare").hidden = last < 2;
  show(last);
  await compare();
}

async function compare() {
  const list = find("differences"), mine = asked;
  list.replaceChildren();
  if (chosen.versions.length < 2) return;
  const side = (id) => ({ subject: chosen.subject, version: Number(find(id).value) });
  try {
    const said = await ask("/v1/diff", { from: side("from"), to: side("to") });
    if (mine !== asked) return;
    const levels = Object.entries(said.levels).map(([name, allowed]) => element("span", { class: `badge ${allowed ? "good" : "bad"}` }, `${name}: ${allowed ? "allowed" : "breaks"}`));
    const sides = (one) => (one.breaks === "FORWARD" ? [one.reader, one.writer] : [one.writer, one.reader]); // old, new
    const line = (name, sign, side) => (side === null ? [] : [element("pre", { class: name }, `${sign} ${name}  ${typeof side === "string" && side !== "" ? side : JSON.stringify(side)}`)]);
    const found = said.differences.map((one) => element("article", { class: one.breaks ? null : "quiet" },
      element("p", {}, element("code", {}, one.path || "/"), ` ${one.rule}${one.breaks ? `, breaks ${one.breaks}` : ""}`),
      element("p", {}, one.message),
      ...line("old", "−", sides(one)[0]),
      ...line("new", "+", sides(one)[1]),
      ...(one.fix ? [element("pre", {}, `fix ${JSON.stringify(one.fix)}`)] : [])));
    const broken = said.differences.some((one) => one.breaks), fixed = said.differences.some((one) => one.fix);
    const together = !broken || fixed ? [] : [element("article", { class: "quiet" },
      element("p", {}, said.repair ? "These changes of the new schema together make it FULL compatible:" : "No change was found that makes it FULL compatible."),
      ...(said.repair || []).map((step) => element("pre", {}, JSON.stringify(step))))];
    const none = found.length ? [] : [element("p", { class: "hint" }, said.same ? "The schemas are the same." : "Nothing breaks.")];
    list.replaceChildren(element("div", { class: "levels" }, ...levels), ...none, ...found, ...together);
  } catch (error) {
    list.replaceChildren(element("p", {}, `Could not compare: ${error.message}`));
  }
}

function tell(text) {
  if (find("status").textContent !== text) find("status").textContent = text;
}

async function refresh() {
  try {
    const said = await ask("/v1/subjects"), before = JSON.stringify(subjects);
    subjects = said.subjects;
    tell(`${subjects.length} subject${subjects.length === 1 ? "" : "s"}, default level ${said.level}`);
    if (JSON.stringify(subjects) !== before || !find("subjects").hasChildNodes()) { // a row that is replaced while it is pressed receives no click
      drawSubjects();
      await open();
    }
  } catch (error) {
    tell(`the registry does not answer: ${error.message}`);
  }
  setTimeout(refresh, AGAIN_MS);
}

find("filter").addEventListener("submit", (event) => event.preventDefault());
find("filter-text").addEventListener("input", drawSubjects);
find("from").addEventListener("change", compare);
find("to").addEventListener("change", compare);
addEventListener("hashchange", () => { drawSubjects(); open(); });
refresh();
