// The page of the service: a history in this tab's memory, recommendations for it, and why. No library, no storage.
"use strict";

const K = 10;
const LATEST_FIRST = true;
const $ = (id) => document.getElementById(id);
const state = { token: "", history: [], before: null, found: [], picked: -1, asked: 0, searched: 0, open: new Set() };

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text) made.textContent = text; // never innerHTML: titles are data
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

async function fetched(path, body) {
  const headers = state.token ? { authorization: `Bearer ${state.token}` } : {};
  const options = body === undefined ? { headers } : {
    method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body),
  };
  const answer = await fetch(path, options);
  $("locked").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

// The history.

function change(history) {
  state.before = state.history;
  state.history = history;
  showHistory();
  refresh();
}

const add = (item) => change([...state.history, item]);

function showHistory() {
  const rows = state.history.map((item, place) => {
    const row = element("li");
    row.append(element("span", item.title, { class: "name" }));
    if (place === state.history.length - 1 && state.history.length > 1) row.append(element("span", "latest", { class: "latest" }));
    const remove = element("button", "✕", { class: "remove", type: "button", "aria-label": `Remove ${item.title}` });
    remove.addEventListener("click", () => {
      change(state.history.filter((_, other) => other !== place));
      const left = $("history").querySelectorAll(".remove");
      (left[Math.min(left.length - 1, state.history.length - place)] || $("search")).focus();
    });
    row.append(remove);
    return row;
  });
  if (LATEST_FIRST) rows.reverse();
  $("history").replaceChildren(...rows);
  $("empty").hidden = state.history.length > 0;
  $("clear").hidden = state.history.length < 2;
  $("undo").hidden = state.before === null;
}

// Recommendations.

async function refresh() {
  const ask = ++state.asked;
  $("next").setAttribute("aria-busy", "true");
  try {
    const history = state.history.map((item) => item.item_id);
    const answer = await fetched("recommend", { history, k: K, why: true });
    if (ask !== state.asked) return; // a later request is under way
    showNext(answer);
  } catch (error) {
    if (ask === state.asked) $("status").textContent = `No answer: ${error.message}.`;
  } finally {
    if (ask === state.asked) $("next").setAttribute("aria-busy", "false");
  }
}

function showNext(answer) {
  const count = answer.recommendations.length;
  $("status").textContent = state.history.length
    ? `${count} items after a history of ${answer.history}.`
    : "The most popular items, by noisy frequencies.";
  $("method").textContent = state.history.length ? `Why: ${answer.method}.` : "";
  $("next").replaceChildren(...answer.recommendations.map(recommendation));
}

function recommendation(entry) {
  const row = element("li");
  const take = element("button", entry.title, { class: "take", type: "button", "aria-label": `${entry.title}: add to the history` });
  take.addEventListener("click", () => {
    add({ item_id: entry.item_id, title: entry.title });
    take.closest("ol").querySelector(".take")?.focus({ preventScroll: true });
  });
  row.append(take);
  if (!state.history.length) return row;
  const parts = reasons(entry);
  const id = `why-${entry.item_id}`;
  const open = state.open.has(entry.item_id);
  const why = element("button", "Why?", { class: "why", type: "button", "aria-expanded": String(open), "aria-controls": id,
    "aria-label": `Why ${entry.title}?` });
  const list = element("ul", "", { class: "reasons", id });
  list.append(...parts.map((part) => reason(part, parts)));
  list.hidden = !open;
  const short = element("span", because(parts), { class: "because" });
  short.hidden = open;
  why.addEventListener("click", () => {
    const now = list.hidden;
    list.hidden = !now;
    short.hidden = now;
    why.setAttribute("aria-expanded", String(now));
    if (now) state.open.add(entry.item_id); else state.open.delete(entry.item_id);
  });
  row.append(why, short, list);
  return row;
}

// An item that is in the history twice counts once, with the sum. The contribution may come from a shared attribute.
function reasons(entry) {
  const sums = new Map();
  for (const { item_id, title, contribution, attribute } of entry.why) {
    const known = sums.get(item_id) || { title, value: 0, attribute };
    known.value += contribution;
    sums.set(item_id, known);
  }
  const parts = [...sums.values()].sort((a, b) => b.value - a.value);
  if (entry.popularity !== null) parts.push({ title: "popularity", value: entry.popularity, rest: true });
  return parts.map((part) => ({ ...part, share: entry.popularity !== null }));
}

const percent = (share) => (share > 0 && share < 0.005 ? "<1%" : `${Math.round(100 * share)}%`);
const shown = (part) => (part.share ? percent(part.value) : (part.value >= 0 ? "+" : "−") + Math.abs(part.value).toFixed(2));

function reason(part, parts) {
  const row = element("li", "", part.rest ? { class: "rest" } : part.value < 0 ? { class: "against" } : {});
  const most = part.share ? 1 : Math.max(...parts.map((other) => Math.abs(other.value)), 1e-9);
  const of = element("span", part.rest ? "its popularity" : part.title, { class: "of" });
  if (part.attribute) of.append(" ", element("span", `both ${part.attribute}`, { class: "attribute" }));
  row.append(of);
  row.append(element("meter", "", { min: 0, max: most, value: Math.max(0, part.value), "aria-hidden": "true" }));
  row.append(element("span", shown(part), { class: "amount-of" }));
  return row;
}

function because(parts) {
  const said = parts.filter((part) => !part.rest && part.value > 0 && (!part.share || part.value >= 0.005)).slice(0, 2);
  if (!said.length) return "popular; nothing in the history contributes";
  const named = (part) => (part.attribute ? `${part.title} (${part.attribute})` : part.title);
  return `after ${said.map((part) => `${named(part)} ${shown(part)}`).join(" · ")}`;
}

// Search: a combobox with the usual keys.

let timer = 0;
$("search").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(search, 80);
});

async function search() {
  const text = $("search").value.trim();
  const ask = ++state.searched;
  if (!text) return closeList();
  try {
    const { items } = await fetched(`items?limit=12&q=${encodeURIComponent(text)}`);
    if (ask === state.searched && text === $("search").value.trim()) showFound(items);
  } catch (error) {
    $("status").textContent = `No answer: ${error.message}.`;
  }
}

function showFound(items) {
  state.found = items;
  const rows = items.map((item, place) => {
    const row = element("li", item.title, { role: "option", id: `found-${place}`, "aria-selected": "false" });
    row.addEventListener("mousedown", (event) => event.preventDefault()); // the input keeps the focus
    row.addEventListener("click", () => choose(place));
    return row;
  });
  $("found").replaceChildren(...(rows.length ? rows : [element("li", "No item matches", { class: "none" })]));
  $("found").hidden = false;
  $("search").setAttribute("aria-expanded", "true");
  pick(rows.length ? 0 : -1);
}

function pick(place) {
  state.picked = place;
  [...$("found").children].forEach((row, other) => {
    if (row.getAttribute("role") !== "option") return;
    row.setAttribute("aria-selected", String(other === place));
    if (other === place) row.scrollIntoView({ block: "nearest" });
  });
  if (place >= 0) $("search").setAttribute("aria-activedescendant", `found-${place}`);
  else $("search").removeAttribute("aria-activedescendant");
}

function closeList() {
  state.searched += 1;
  state.found = [];
  $("found").hidden = true;
  $("search").setAttribute("aria-expanded", "false");
  pick(-1);
}

function choose(place) {
  const { item_id, title } = state.found[place];
  $("search").value = "";
  closeList();
  add({ item_id, title });
}

$("search").addEventListener("keydown", (event) => {
  const count = state.found.length;
  if (event.key === "ArrowDown" && count) pick((state.picked + 1) % count);
  else if (event.key === "ArrowUp" && count) pick((state.picked + count - 1) % count);
  else if (event.key === "Enter" && state.picked >= 0) choose(state.picked);
  else if (event.key === "Escape") { $("search").value = ""; closeList(); }
  else if (event.key === "Backspace" && !$("search").value && state.history.length) change(state.history.slice(0, -1));
  else return;
  event.preventDefault();
});
$("search").addEventListener("blur", closeList);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target === $("search")) return;
  event.preventDefault();
  $("search").focus();
});
$("clear").addEventListener("click", () => { change([]); $("search").focus(); });
$("undo").addEventListener("click", () => { change(state.before); });

// Privacy facts.

const CODE = { user: "one user's entire history" };
const upTo3 = (epsilon) => (Math.ceil(epsilon * 1000 - 1e-9) / 1000).toString();

function showFacts(facts, health) {
  $("size").textContent = health.items.toLocaleString("en");
  const covered = facts.private;
  $("protects").textContent = covered ? CODE[facts.unit] || facts.unit || CODE.user : "no one";
  $("epsilon").textContent = facts.epsilon === null ? "∞" : upTo3(facts.epsilon);
  $("delta").textContent = facts.delta === null ? "–" : `1 in ${Math.floor(1 / facts.delta + 1e-6).toLocaleString("en")}`;
  if (!covered) {
    $("not-private").textContent = facts.headline;
    $("not-private").hidden = false;
    $("void").textContent = facts.epsilon === null ? "No noise: no guarantee" : "Void: the noise was seeded";
    $("void").hidden = false;
  }
  const rows = [];
  for (const event of facts.events || []) rows.push([`Noise on ${event.label || event.kind}`, event.noise_multiplier.toPrecision(3)]);
  if (facts.users) rows.push(["Users, N (assumed public)", facts.users.toLocaleString("en")]);
  if (facts.steps) rows.push(["Training steps", facts.steps.toLocaleString("en")]);
  rows.push(["Model", health.model], ["Random numbers", facts.random_source || "–"]);
  $("rows").replaceChildren(...rows.map(([name, value]) => {
    const row = element("p", "", { class: "row" });
    row.append(element("span", name), element("b", value));
    return row;
  }));
  $("words").replaceChildren(...[facts.headline, ...(facts.words || [])].filter((w, i, all) => all.indexOf(w) === i).map((w) => element("p", w)));
  $("not-covered").replaceChildren(...(facts.not_covered || []).map((words) => element("li", words)));
}

// The token of a service that requires one, kept in this tab's memory like everything else.

$("unlock").addEventListener("click", () => { state.token = $("token").value.trim(); start(); });
$("token").addEventListener("keydown", (event) => { if (event.key === "Enter") $("unlock").click(); });

async function start() {
  showHistory();
  refresh();
  try {
    const [facts, health] = await Promise.all([fetched("statement"), fetched("health")]);
    showFacts(facts, health);
  } catch (error) {
    $("status").textContent = `No statement: ${error.message}.`;
  }
}

start();
