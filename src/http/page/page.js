"use strict";
// Shows the relay's own data. All text is set as text, never as HTML, because names of keys and
// messages of errors contain text that other people wrote.

const REFRESH_MS = 5000;
let range = "hour";
let history = { hour: [], day: [] };
let token = sessionStorage.getItem("token") || "";
const byId = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bytes(count) {
  if (count === null || count === undefined) return "unknown";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1024 && unit + 1 < units.length) { count /= 1024; unit += 1; }
  return `${unit > 0 && count < 10 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 0.001) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

const count = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;
const rate = (value) => (value === null ? "unknown" : `${value < 10 ? value.toFixed(1) : Math.round(value)}/s`);

const GRAPHS = [
  ["Events published", "events_per_second", rate],
  ["Commit to Pub/Sub", "latency", time],
  ["Oldest waiting event", "lag_seconds", time],
  ["WAL not confirmed", "lag_bytes", bytes],
  ["WAL kept for the slot", "retained_bytes", bytes],
  ["WAL until the slot is lost", "headroom_bytes", bytes],
];

async function ask(path) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers });
  if (answer.status === 401) {
    byId("login").hidden = false;
    throw new Error("enter the token of this relay");
  }
  if (answer.status === 429) throw new Error("Another search is running: try again in a few seconds.");
  if (!answer.ok) throw new Error(`${path.split("?")[0]} answers ${answer.status}`);
  return answer.json();
}

// Returns one line per stretch of known values, so a gap shows that the value was unknown.
function lines(samples, field, from, to) {
  const values = samples.map((sample) => sample[field]).filter((value) => value !== null);
  const largest = Math.max(...values, 0) || 1;
  const stretches = [[]];
  for (const sample of samples) {
    const value = sample[field];
    if (value === null) { stretches.push([]); continue; }
    const x = ((sample.at - from) / Math.max(to - from, 1)) * 300;
    stretches.at(-1).push(`${x.toFixed(1)},${(98 - (value / largest) * 94).toFixed(1)}`);
  }
  return { largest: values.length ? largest : null, stretches: stretches.filter((points) => points.length > 0) };
}

function graph([title, field, shown], samples, from, to) {
  const figure = element("figure");
  const caption = element("figcaption");
  const last = samples.length ? samples.at(-1)[field] : null;
  caption.append(element("span", title), element("strong", last === null ? "-" : shown(last)));
  const { largest, stretches } = lines(samples, field, from, to);
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 300 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}: ${last === null ? "-" : shown(last)} now, peak ${largest === null ? "-" : shown(largest)}`);
  const base = document.createElementNS(space, "line");
  for (const [name, value] of [["x1", 0], ["x2", 300], ["y1", 98], ["y2", 98]]) base.setAttribute(name, value);
  svg.append(base);
  for (const points of stretches) {
    const line = document.createElementNS(space, "polyline");
    const [only] = points;
    line.setAttribute("points", points.length > 1 ? points.join(" ") : `${only} ${only}`);
    svg.append(line);
  }
  const scale = element("div", undefined, "scale");
  scale.append(element("span", `${time(to - from)} ago`), element("span", largest === null ? "" : `peak ${shown(largest)}`));
  figure.append(caption, svg, scale);
  return figure;
}

function drawGraphs() {
  const samples = history[range];
  const to = samples.length ? samples.at(-1).at : 0;
  const from = samples.length ? samples[0].at : 0;
  byId("graphs").replaceChildren(...GRAPHS.map((kind) => graph(kind, samples, from, to)));
}

function article(title, ...paragraphs) {
  const made = element("article");
  made.append(element("p", title));
  for (const [text, className] of paragraphs) if (text) made.append(element("p", text, className));
  return made;
}

function fill(id, articles, empty) {
  byId(id).replaceChildren(...(articles.length ? articles : [element("p", empty, "hint")]));
}

const shortName = (topic) => topic.split("/topics/").at(-1);

const waits = (key) => `key ${key.ordering_key}: ${count(key.waiting_events, "event")}, the oldest ${time(key.oldest_seconds)} old`;

function showTopics(overview, status) {
  const topics = (overview.topics || status.topics).map((topic) => article(
    shortName(topic.topic),
    [`${topic.code} for ${time(topic.for_seconds)}, ${count(topic.failures, "failure")}, ${count(topic.waiting_events, "event")} waiting` +
      (topic.oldest_seconds === null ? "" : `, the oldest ${time(topic.oldest_seconds)} old`)],
    [topic.error], [topic.hint, "hint"], ...(topic.keys || []).map((key) => [waits(key)])));
  const more = status.failing_topics - status.topics.length;
  if (more > 0) topics.push(element("p", `and ${more} more`));
  fill("topics", topics, "None.");
}

function showOverview(overview, status) {
  const slot = overview.slot || {};
  const remedy = byId("remedy");
  const { state, severity, meaning, remedy: advice, caught_up_in_seconds: left } = overview.relay;
  const word = byId("word");
  word.textContent = state.replaceAll("-", " ");
  word.className = `word ${severity}`;
  byId("meaning").textContent = status.holder ? `${meaning}: the slot is held by ${status.holder}` : meaning;
  const hint = overview.error ? `${overview.error.what}: ${overview.error.hint}` : advice;
  remedy.hidden = !hint;
  remedy.textContent = hint || "";
  document.title = `${word.textContent} - Postrider`;
  const problems = overview.publication ? overview.publication.problems.map((problem) => problem.what) : [];
  const holders = (slot.held_back_by || []).map((holder) => [holder.kind, holder.pid ? `process ${holder.pid}` : "", holder.name || "", holder.user || "", holder.application_name || ""].filter(Boolean).join(" "));
  const facts = [
    ["Not confirmed", bytes(status.lag_bytes)],
    ["Waiting events", slot.pending_events === null || slot.pending_events === undefined ? "unknown"
      : (slot.pending_is_lower_bound ? "at least " : "") + String(slot.pending_events)],
    ["Caught up in", left === null ? (state === "catching-up" ? "unknown" : "") : `about ${time(left)}`],
    ["Published since the start", String(status.events_published)],
    ["WAL kept", bytes(slot.retained_bytes)],
    ["Until the slot is lost", slot.safe_wal_size === undefined ? "unknown" : slot.safe_wal_size === null ? "no limit is set: watch the disk" : bytes(Math.max(slot.safe_wal_size, 0)) + (typeof history.loss_in_seconds === "number" ? `, in about ${time(history.loss_in_seconds)} at the present rate` : "")],
    ["WAL is held by", holders.join("; ")],
    ["Publication", problems.length ? problems.join("; ") : status.publication_ok === true ? "covers all rows" : "wrong or unknown"],
    ["Tables", (overview.tables || []).join(", ")],
  ];
  const list = facts.filter(([, value]) => value).flatMap(([name, value]) => [element("dt", name), element("dd", value)]);
  byId("facts").replaceChildren(...list);
  const quarantine = overview.quarantine;
  const keys = quarantine ? quarantine.keys.map((key) => article(
    `key ${key.ordering_key || "(none)"}, topic ${shortName(key.topic) || "(unknown)"}`,
    [`${key.events >= 1000 ? "at least " : ""}${count(key.events, "event")}, the oldest ${time(key.oldest_seconds)} old, first ${key.first_event}`], [key.error],
    [`postrider quarantine show ${key.first_event}`, "hint"])) : [];
  if (quarantine && quarantine.events > 0) keys.unshift(element("p", `${quarantine.events} ${quarantine.events === 1 ? "event waits" : "events wait"}.`));
  fill("quarantine", keys, quarantine ? "Empty." : "Unknown.");
}

function showErrors(errors) {
  fill("errors", errors.map((error) => article(
    `${error.code}, ${time(error.seconds_ago)} ago`, [error.what], [error.hint, "hint"])), "None since this relay started.");
}

function foundEvent(event) {
  const record = event.record || {};
  const times = record.recorded_at ? `committed ${record.committed_at}, recorded ${record.recorded_at}` +
    (record.attempts > 1 ? `, ${record.attempts} requests with which Pub/Sub may have stored it` : "") : "";
  return article(
    event.source_id || event.event_id,
    [event.meaning],
    [`topic ${event.topic ? shortName(event.topic) : "(unknown)"}, key ${event.ordering_key || "(none)"}` +
      (event.message_id ? `, message ${event.message_id}` : "") + (event.replay ? ` by replay ${event.replay}` : "")],
    ...event.earlier_messages.map((message) => [`published before as message ${message.message_id}` +
      (message.replay ? ` by replay ${message.replay}` : "") + (message.published_at ? ` at ${message.published_at}` : ""), "hint"]),
    [record.error], [times, "hint"]);
}

let searches = 0;

// The search is in the fragment of the URL, so that users can share a link to the search.
async function search() {
  const [kind, wanted] = [...new URLSearchParams(location.hash.slice(1))][0] || [];
  if ((kind !== "id" && kind !== "key") || !wanted) return;
  searches += 1;
  const current = searches;
  byId("wanted").value = wanted;
  byId("found").replaceChildren(element("p", "Searching.", "hint"));
  try {
    const answer = await ask(`events?${new URLSearchParams({ [kind]: wanted })}`);
    if (current !== searches) return;
    const events = answer.error
      ? [article(answer.error.what, [answer.error.hint, "hint"])]
      : answer.events.map(foundEvent);
    fill("found", events, kind === "id"
      ? "No event found with this id."
      : "No event with this key is waiting, and none was recorded in the last 24 hours.");
    if (answer.dispatch === "exceptions") byId("found").append(element("p",
      "With dispatch = exceptions published events have no record, so only quarantined events are listed.", "hint"));
    if (answer.more_wait) byId("found").append(element("p", "More events are waiting; this search did not read all of them.", "hint"));
  } catch (error) {
    if (current === searches) byId("found").replaceChildren(element("p", error.message));
  }
}

async function refresh() {
  try {
    const [status, overview, past, errors] = await Promise.all(["status", "overview", "history", "errors"].map(ask));
    byId("login").hidden = true;
    byId("slot").textContent = status.slot;
    history = past;
    showOverview(overview, status);
    showTopics(overview, status);
    showErrors(errors);
    drawGraphs();
    byId("age").textContent = `Updated ${new Date().toLocaleTimeString()}, every ${REFRESH_MS / 1000} seconds.`;
  } catch (error) {
    byId("word").textContent = "no answer";
    byId("word").className = "word error";
    byId("meaning").textContent = error.message;
  }
}

for (const id of ["hour", "day"]) {
  byId(id).addEventListener("click", () => {
    range = id;
    for (const other of ["hour", "day"]) byId(other).setAttribute("aria-pressed", String(other === id));
    drawGraphs();
  });
}
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value;
  sessionStorage.setItem("token", token);
  refresh();
  search();
});
byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const kind = event.submitter ? event.submitter.value : "id";
  const hash = `#${new URLSearchParams({ [kind]: byId("wanted").value })}`;
  if (location.hash === hash) search(); else location.hash = hash;
});
addEventListener("hashchange", search);
search();
refresh();
setInterval(refresh, REFRESH_MS);
