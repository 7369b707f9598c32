// The studio's page. State is one object, kept in the address; the server decides everything about it.
"use strict";
const body = document.body;
const token = body.dataset.token, language = body.dataset.language, words = JSON.parse(body.dataset.words);
const byId = (id) => document.getElementById(id);
const empty = () => ({ sets: {}, flags: {}, device: byId("device").value, budget: null });
let state = empty(), past = [], shown = 0, pinned = 0, asked = 0, drawn = 0;

async function call(path, data) {
  const options = { headers: { "X-Studio-Token": token } };
  if (data !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(data);
    options.headers["Content-Type"] = "application/json";
  }
  const join = path.includes("?") ? "&" : "?";
  const answer = await fetch(path + join + "lang=" + language, options);
  const result = await answer.json().catch(() => ({ error: words.lost }));
  if (!answer.ok) throw new Error(result.error || words.lost);
  return result;
}

function readAddress() {
  const text = new URLSearchParams(location.hash.slice(1)).get("state");
  if (!text) return empty();
  try { return { ...empty(), ...JSON.parse(text) }; } catch { return empty(); }
}

function writeAddress() {
  const hash = new URLSearchParams({ state: JSON.stringify(state) });
  history.replaceState(null, "", location.pathname + location.search + "#" + hash);
}

function say(id, text) { byId(id).textContent = text || ""; }

function problem(text) {
  const box = byId("problem");
  box.textContent = text || "";
  box.hidden = !text;
}

// A new state: remembered for undo, checked, and run if it is possible.
async function change(next, remember = true) {
  if (remember) past.push(JSON.stringify(state));
  state = next;
  byId("undo").disabled = past.length === 0;
  writeAddress();
  await refresh();
}

async function refresh() {
  const mine = ++asked;
  try {
    const found = await call("/api/check", state);
    if (mine !== asked) return;
    draw(found.controls);
    problem(found.problem);
    if (found.problem) return;
    const one = await call("/api/tries", state);
    if (mine !== asked) return;
    shown = one.number;
    await show();
  } catch (error) { if (mine === asked) problem(error.message); }
}

// Two answers about one try may come in the wrong order: the one that was asked for last is the newest.
async function show() {
  const mine = ++drawn;
  const found = await call("/api/tries/" + shown + (pinned ? "?pinned=" + pinned : ""));
  if (mine !== drawn || found.number !== shown) return;
  byId("right").classList.toggle("busy", ["waiting", "running"].includes(found.state));
  if (!["waiting", "running"].includes(found.state)) byId("result").innerHTML = found.html;
  byId("result").dataset.number = found.number;
  byId("result").dataset.state = found.state;
  say("progress", { waiting: words.waiting, running: words.running, figures: words.explaining }[found.state]);
  links();
  glance(found.verdict);
  await drawHistory();
}

// On a narrow screen the result is below the settings: the verdict is beside the buttons as well.
function glance(verdict) {
  const link = byId("at-a-glance"), peak = byId("peak");
  link.hidden = !verdict;
  link.className = "tag " + ({ fits: "good", barely: "warn", unknown: "warn" }[verdict] || "bad");
  link.textContent = [words[verdict], peak && peak.textContent].filter(Boolean).join(" ");
}

async function drawHistory() {
  const found = await call("/api/history?pinned=" + pinned + "&device=" + encodeURIComponent(state.device));
  byId("tries").innerHTML = found.html;
  byId("stop").hidden = !found.searching;
  byId("search").disabled = found.searching;
  const row = document.querySelector(`tr[data-number="${shown}"]`);
  if (row) row.classList.add("current");
}

function links() {
  for (const link of document.querySelectorAll("[data-export]"))
    link.href = `/api/tries/${shown}/export/${link.dataset.export}?token=${encodeURIComponent(token)}&lang=${language}`;
}

function field(control, into) {
  const box = document.createElement("div"), label = document.createElement("label");
  box.className = "field";
  label.htmlFor = "c-" + control.key;
  label.textContent = words[control.key] || control.key;
  let input;
  if (control.kind === "select") {
    input = document.createElement("select");
    for (const option of control.options) {
      const item = new Option(words[option.label] || option.label, option.value, false, option.value === control.value);
      item.disabled = Boolean(option.refused);
      item.title = option.refused || "";
      input.add(item);
    }
  } else {
    input = document.createElement("input");
    input.type = control.kind === "number" ? "number" : "text";
    if (control.kind === "number") { input.min = "1"; input.max = "1000000000"; }
    input.maxLength = 200;
    input.value = control.value;
  }
  input.id = "c-" + control.key;
  input.addEventListener("change", () => changed(control, input.value));
  box.append(label, input);
  const refused = control.options.filter((option) => option.refused);
  if (refused.length) {
    const why = document.createElement("details"), title = document.createElement("summary");
    why.className = "why";
    title.textContent = words.refused + ": " + refused.map((option) => words[option.label] || option.label).join(", ");
    why.append(title);
    for (const option of refused) {
      const line = document.createElement("p"), value = document.createElement("b");
      value.textContent = (words[option.label] || option.label) + ": ";
      line.append(value, option.refused);
      why.append(line);
    }
    box.append(why);
  }
  into.append(box);
}

function changed(control, value) {
  if (control.kind === "variable") return change({ ...state, sets: { ...state.sets, [control.key]: value } });
  const option = control.options.find((item) => item.value === value);
  const patch = option ? option.patch : { [control.flag]: value };
  return change({ ...state, flags: { ...state.flags, ...patch } });
}

function draw(controls) {
  const focused = document.activeElement && document.activeElement.id;
  byId("fields").replaceChildren();
  byId("variables").replaceChildren();
  for (const control of controls) field(control, byId(control.kind === "variable" ? "variables" : "fields"));
  byId("device").value = state.device;
  byId("budget").value = state.budget || "";
  if (focused && byId(focused)) byId(focused).focus();
}

function undo() {
  if (past.length) change(JSON.parse(past.pop()), false);
}

function listen() {
  const source = new EventSource("/api/events?token=" + encodeURIComponent(token) + "&lang=" + language);
  source.addEventListener("try", (event) => {
    const data = JSON.parse(event.data);
    if (data.number === shown) show().catch((error) => say("progress", error.message));
    else drawHistory().catch(() => {});
  });
  source.addEventListener("progress", (event) => {
    const data = JSON.parse(event.data);
    if (data.number === shown && data.phase)
      say("progress", `${words.running} rank ${data.rank}: ${data.phase}` + (data.memory_mb ? ` ${data.memory_mb}M` : ""));
  });
  source.addEventListener("search", (event) => {
    const data = JSON.parse(event.data);
    say("search-text", data.state === "done" ? `✓ ${data.text}` : data.text);
    drawHistory().catch(() => {});
  });
  source.onerror = () => say("progress", words.lost);
  source.addEventListener("hello", () => { say("progress", ""); if (shown) show().catch(() => {}); });
}

document.addEventListener("click", async (event) => {
  const at = event.target.closest("button");
  if (!at) return;
  if (at.dataset.patch) change({ ...state, flags: { ...state.flags, ...JSON.parse(at.dataset.patch) } });
  if (at.dataset.pin) { pinned = pinned === Number(at.dataset.pin) ? 0 : Number(at.dataset.pin); await show(); }
  if (at.dataset.show) { const found = await call("/api/tries/" + at.dataset.show); await change({ ...empty(), ...found.choice }); }
  if (at.dataset.languageTo) {
    const to = new URL(location.href);
    to.searchParams.set("lang", at.dataset.languageTo);
    location.href = to;
    if (to.search === location.search) location.reload();
  }
});
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("device").addEventListener("change", (event) => change({ ...state, device: event.target.value }));
byId("budget").addEventListener("change", (event) => change({ ...state, budget: event.target.value.trim() || null }));
byId("set-flag").addEventListener("click", () => {
  const name = byId("flag").value.trim();
  if (name) change({ ...state, flags: { ...state.flags, [name]: byId("flag-value").value.trim() } });
});
byId("undo").addEventListener("click", undo);
byId("reset").addEventListener("click", () => change(empty()));
byId("search").addEventListener("click", () => call("/api/search", state).then(drawHistory).catch((error) => say("search-text", error.message)));
byId("stop").addEventListener("click", () => call("/api/stop", {}).then(() => say("search-text", words.stopping)).catch(() => {}));
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement;
  if ((event.ctrlKey || event.metaKey) && event.key === "z" && !typing) { event.preventDefault(); undo(); }
});
byId("at-a-glance").addEventListener("click", (event) => { event.preventDefault(); byId("result").focus(); byId("result").scrollIntoView(); });
window.addEventListener("hashchange", () => { const next = readAddress(); if (JSON.stringify(next) !== JSON.stringify(state)) change(next); });

state = readAddress();
listen();
refresh();
