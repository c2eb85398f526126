// Asks for status.json every two seconds and has it drawn; says so when nobody answers, or a token is wanted.

import { ago, text } from "./draw.js";
import { draw, openAll } from "./sections.js";

const SCHEMA = 1;
const EVERY_MS = 2000;
const SLOWEST_MS = 30000;
const ANSWER_MS = 8000;
const KEY = "kvstrata-token";

const $ = (id) => document.getElementById(id);
let last = null; // the last document
let lastAt = 0; // when it came, by performance.now()
let failures = 0;
let problem = "";
let timer = 0;
let asking = false;

const token = () => sessionStorage.getItem(KEY) ?? "";

async function ask() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  const stop = new AbortController();
  const late = setTimeout(() => stop.abort(), ANSWER_MS);
  let wanted = false;
  try {
    const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
    const answer = await fetch("status.json", { headers, signal: stop.signal, cache: "no-store", credentials: "same-origin" });
    if (answer.status === 401 || answer.status === 403) {
      wanted = true;
      refused(answer.status);
    } else if (!answer.ok) throw new Error(`the master answers ${answer.status}`);
    else taken(await answer.json());
  } catch (error) {
    failures += 1;
    problem = error.name === "AbortError" ? `no answer in ${ANSWER_MS / 1000} s` : error instanceof TypeError ? "the master cannot be reached" : String(error.message);
  } finally {
    clearTimeout(late);
    asking = false;
  }
  freshness();
  if (!wanted && !document.hidden) timer = setTimeout(ask, Math.min(SLOWEST_MS, EVERY_MS * 1.6 ** Math.max(0, failures - 1)));
}

function taken(status) {
  if (status.schema !== SCHEMA) throw new Error(`this page knows schema ${SCHEMA}, and the master speaks ${status.schema}: reload the page`);
  last = status;
  lastAt = performance.now();
  failures = 0;
  $("token-form").hidden = true;
  $("forget").hidden = !token();
  $("content").hidden = false;
  redraw();
}

function redraw() {
  if (last) draw(last, { nodes: $("nodes-filter").value, tenants: $("tenants-filter").value });
}

function refused(status) {
  failures = 0;
  last = null;
  $("content").hidden = true;
  $("forget").hidden = true;
  const form = $("token-form");
  if (token()) {
    sessionStorage.removeItem(KEY);
    text($("token-why"), status === 403 ? "That token may not look at the pool: it needs the role “read”, “operate” or “admin”." : "That token is not known here, or has been taken away. Give another one.");
  }
  form.hidden = false;
  $("token").focus();
}

/** How old what is shown is: the dot in the header, and a line when it is stale. */
function freshness() {
  const live = $("live");
  const age = (performance.now() - lastAt) / 1000;
  const form = !$("token-form").hidden;
  const state = form ? "waiting" : failures ? "lost" : last ? "fresh" : "waiting";
  live.className = `live ${state}`;
  text($("live-text"), form ? "token needed" : failures ? "not live" : last ? "live" : "connecting");
  const stale = $("stale");
  document.body.classList.toggle("old", Boolean(failures && last));
  stale.hidden = !failures || form;
  if (!failures) return;
  const since = new Date(Date.now() - age * 1000).toLocaleTimeString([], { hour12: false });
  text(stale, last ? `Stale since ${since}: ${problem}. What is below is how it was then; the page goes on asking.` : `Nothing to show: ${problem}. The page goes on asking.`);
  if (last) document.title = `? Stale · kvstrata ${last.cluster_id}`;
  text($("live-text"), last ? `not live for ${ago(age)}` : "not live");
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  $("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(given)) {
    text($("token-why"), "A token has letters, digits, “-” and “_” only: was it copied whole?");
    return;
  }
  sessionStorage.setItem(KEY, given);
  ask();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  ask();
});
document.addEventListener("click", (event) => {
  const which = event.target.closest?.("[data-open]")?.dataset.open;
  if (which) {
    openAll(which);
    redraw();
  }
});
for (const id of ["nodes-filter", "tenants-filter"]) $(id).addEventListener("input", redraw);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && $("token-form").hidden) ask();
});
setInterval(() => {
  if (failures) freshness();
}, 1000);
ask();
