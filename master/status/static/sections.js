// The sections of the page, each from the status document.

import { ago, badge, bar, bytes, code, count, el, empty, moment, name, percent, put, rate, sparkline, table, text } from "./draw.js";

const $ = (id) => document.getElementById(id);
/** Rows of a table until all are asked for. */
const ROWS = 25;
const opened = new Set();
const TIERS = [["dram", "memory"], ["ssd", "SSD"]];

/** Draw everything. `filters`: what is typed into the filters of nodes and tenants. */
export function draw(status, filters) {
  verdict(status);
  cards(status);
  lookups(status);
  nodes(status, filters.nodes);
  tenants(status, filters.tenants);
  events(status);
  masters(status);
  copies(status);
  clients(status);
  text($("software"), `${status.software}, status schema ${status.schema}`);
}

export function openAll(which) {
  opened.add(which);
}

// ---------------------------------------------------------------- the first five seconds

const WORDS = { healthy: ["Healthy", "✓"], attention: ["Needs attention", "!"], trouble: ["In trouble", "✕"] };

function verdict(status) {
  const [words, sign] = WORDS[status.verdict] ?? WORDS.trouble;
  $("verdict").className = `verdict ${status.verdict}`;
  text($("verdict-word"), words);
  text($("verdict-sign"), sign);
  text($("cluster"), status.cluster_id);
  const worst = status.attention.length;
  document.title = `${sign} ${words}${worst ? ` (${worst})` : ""} · kvstrata ${status.cluster_id}`;
  put($("verdict-line"), ...leaderLine(status));
  put($("attention"), ...status.attention.map((row) => el("li", { class: row.severity },
    badge(row.severity, row.severity), el("div", {},
      el("span", { class: "what", dir: "auto" }, row.text), row.do ? el("span", { class: "do", dir: "auto" }, row.do) : null))));
}

function leaderLine(status) {
  const { master, leader } = status;
  const up = `up ${ago(status.uptime_seconds)}`;
  if (master.leading) return [el("strong", {}, "This master leads"), ` (${master.channel}, epoch ${master.epoch}), ${up}.`];
  if (!leader) return [el("strong", {}, "Nobody leads."), ` This master stands by, ${up}.`];
  const there = link(leader.http, "Open the leader’s page");
  return [el("strong", {}, "This master stands by. "), `The leader is ${leader.channel}, epoch ${master.epoch}. `, there];
}

/** A link to the page of another master; nothing for what is no HOST:PORT. */
function link(http, words) {
  if (!http || !/^[A-Za-z0-9._:[\]-]+:\d{1,5}$/.test(http)) return null;
  return el("a", { href: `${location.protocol}//${http}/`, rel: "noreferrer" }, words);
}

// ---------------------------------------------------------------- key figures

function card(title, figure, detail, picture, kind = "") {
  return el("div", { class: `figure ${kind}` }, el("h3", {}, title), el("p", { class: "big" }, figure), picture, el("p", { class: "small" }, detail));
}

function cards(status) {
  const { totals, lookups: seen, series, transfers } = status;
  const missing = totals.nodes - totals.nodes_active;
  const rates = series.asked.map((asked, at) => (asked ? series.hit[at] / asked : null));
  const made = [
    card("Nodes active", `${totals.nodes_active} of ${totals.nodes}`, missing > 0 ? `${missing} not active` : totals.nodes ? "all are here" : "none yet",
      null, missing > 0 ? "bad" : ""),
    card("Hit rate", percent(seen.minute.hit_rate), `hour ${percent(seen.hour.hit_rate)}${alone(status) ? "" : ", asked here"}`,
      sparkline(rates, spoken("Hit rate", rates, percent), 1)),
    ...TIERS.map(([tier, title]) => {
      const { used, size } = totals[tier];
      const part = size ? used / size : 0;
      const picture = size ? bar([{ share: part, kind: tier }], `${title}: ${percent(part)} used`) : null;
      return card(title === "SSD" ? "SSD" : "Memory", size ? percent(part) : "–", size ? `${bytes(used)} of ${bytes(size)}` : "none", picture);
    }),
    moved("Loads", transfers.bytes_out_per_second, series.bytes_out),
    moved("Stores", transfers.bytes_in_per_second, series.bytes_in),
    card("Blocks", count(totals.blocks), `${totals.clients} client${totals.clients === 1 ? "" : "s"}`, null),
  ];
  put($("cards"), ...made);
}

/** Bytes a second now, and over the last hour; the series has bytes a minute. */
function moved(title, now, minutes) {
  const rates = minutes.map((value) => (value === null ? null : value / 60));
  const peak = Math.max(0, ...rates.filter((value) => value !== null));
  return card(title, rate(now), `peak ${rate(peak)}`, sparkline(rates, spoken(title, rates, rate)));
}

function spoken(what, values, shown) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return `${what}, last hour: nothing yet`;
  return `${what}, last hour: now ${shown(known[known.length - 1])}, lowest ${shown(Math.min(...known))}, highest ${shown(Math.max(...known))}`;
}

// ---------------------------------------------------------------- lookups

/** Whether this master answers all lookups: an engine asks the one that it has reached, whoever leads. */
const alone = (status) => status.masters.length < 2;

function lookups(status) {
  const { minute, hour } = status.lookups;
  if (!hour.asked) {
    const nobody = alone(status) ? "No engine has asked for a block in the last hour."
      : "No engine has asked this master for a block in the last hour; see the other masters, too.";
    const lines = [el("p", {}, `${nobody} Point one at `, code(status.master.channel), ", or try: ", code(`kvstrata bench --master ${status.master.channel}`))];
    put($("lookups"), empty("Nothing was looked up", ...lines));
    return;
  }
  const spans = [["Last minute", minute], ["Last hour", hour]];
  const rows = Object.keys({ ...minute.misses, ...hour.misses }).map((reason) => ({
    reason, now: part(minute, minute.misses[reason]), then: part(hour, hour.misses[reason]),
  }));
  rows.sort((one, other) => other.now - one.now || other.then - one.then);
  put($("lookups"),
    alone(status) ? null : el("p", { class: "small" }, "What this master was asked. Each of the others answers engines of its own."),
    ...spans.map(([title, span]) => spanBar(title, span)),
    el("p", { class: "legend" }, ...[["dram", "found in memory"], ["ssd", "found on SSD"], ["miss", "not found"]].map(([kind, words]) =>
      el("span", {}, el("span", { class: `key ${kind}`, "aria-hidden": "true" }), words))),
    rows.length ? table("Why blocks were not found", [["why not found", "main"], ["last minute", "num"], ["last hour", "num"], ["what to do", "hint"]],
      rows.slice(0, 10).map(({ reason, now, then }) => {
        const known = status.miss_reasons[reason] ?? { means: reason, do: "" };
        const rising = now - then > 0.05 ? badge("warning", "rising") : null;
        return [[known.means, rising ? " " : null, rising], percent(now), percent(then), known.do];
      })) : el("p", { class: "small" }, "Every block that was asked for was there."));
}

const part = (span, n) => (span.asked ? (n ?? 0) / span.asked : 0);

function spanBar(title, span) {
  const shares = { dram: part(span, span.hits.dram), ssd: part(span, (span.hits.ssd ?? 0) + (span.hits.hbm ?? 0)) };
  const miss = span.asked ? 1 - shares.dram - shares.ssd : 0;
  const words = span.asked
    ? `${percent(shares.dram)} memory, ${percent(shares.ssd)} SSD, ${percent(miss)} not found, of ${count(span.asked)} blocks`
    : "nothing was asked";
  const picture = bar([{ share: shares.dram, kind: "dram" }, { share: shares.ssd, kind: "ssd" }, { share: miss, kind: "miss" }], words);
  return el("div", { class: "span" }, el("h3", {}, title), picture, el("p", { class: "small" }, words));
}

// ---------------------------------------------------------------- nodes and tenants

/** The rows that a filter leaves, cut to `ROWS` unless all were asked for; and the button that asks for them. */
function cut(which, rows, filter, nameOf) {
  const box = $(`${which}-filter`).closest("label");
  box.hidden = rows.length <= 8;
  const wanted = filter.trim().toLowerCase();
  const found = wanted ? rows.filter((row) => nameOf(row).toLowerCase().includes(wanted)) : rows;
  if (opened.has(which) || found.length <= ROWS) return [found, wanted && !found.length ? el("p", { class: "small" }, "None has that in its name.") : null];
  return [found.slice(0, ROWS), el("button", { type: "button", "data-open": which }, `Show all ${found.length}`)];
}

function nodes(status, filter) {
  if (!status.nodes.length) {
    put($("nodes"), empty("No node has attached yet", el("p", {}, "Start one on each machine that gives memory or SSD:"),
      el("pre", {}, `kvstrata storage --master ${status.master.channel} --dram 8GiB`)));
    return;
  }
  const [rows, more] = cut("nodes", status.nodes, filter, (node) => `${node.node_id} ${node.host} ${node.state}`);
  put($("nodes"), table("Nodes", [["node", "main"], ["state", "state"], ["memory", "wide"], ["SSD", "wide"], ["loads", "num"], ["stores", "num"], ["blocks", "num"], ["heartbeat", "num"]],
    rows.map((node) => [
      [name(node.node_id), el("span", { class: "sub", dir: "auto" }, node.host || node.channel)],
      nodeState(node, status.at), usage(node.dram, "dram", node.dram.size), usage(node.ssd, "ssd", node.ssd.size), rate(node.bytes_out_per_second),
      rate(node.bytes_in_per_second), count(node.blocks), node.heartbeat_age_seconds === null ? "–" : ago(node.heartbeat_age_seconds),
    ])), more, status.nodes_left_out ? el("p", { class: "small" }, `${status.nodes_left_out} more are not shown.`) : null);
}

const KINDS = { active: "good", joining: "notice", suspected: "warning", offline: "critical" };

function nodeState(node, at) {
  const shown = node.gone ? badge("info", "stopped") : badge(KINDS[node.state] ?? "warning", node.state);
  const notes = [];
  if (node.state !== "active" && node.since) notes.push(`for ${ago(at - node.since)}`);
  if (node.drain) {
    const moved = node.drain.bytes_total ? ` ${percent(node.drain.bytes_moved / node.drain.bytes_total)}` : "";
    notes.push(`${node.drain.state}${moved}`);
  }
  const failed = node.devices.filter((device) => device.state === "failed").length;
  if (failed) notes.push(`${failed} device${failed > 1 ? "s" : ""} failed`);
  if (node.copies) notes.push(`${node.copies} copies under way`);
  return [shown, notes.length ? el("span", { class: "sub" }, notes.join(", ")) : null];
}

function usage(tier, kind, size, floor = 0) {
  if (size === null) return [el("span", {}, tier.used ? bytes(tier.used) : "–"), el("span", { class: "sub" }, "no limit")];
  if (!size && !tier.used) return "–";
  const share = size ? tier.used / size : 1;
  return [bar([{ share, kind: share >= 0.98 && kind === "limit" ? "full" : kind }], `${percent(share)} used`, floor && size ? floor / size : null),
    el("span", { class: "sub" }, `${bytes(tier.used)} of ${bytes(size)}`)];
}

const STATES = { full: ["warning", "at its limit"], near: ["notice", "near its limit"], ok: ["good", "within"] };

function tenants(status, filter) {
  if (status.tenants === null) {
    const there = status.leader ? link(status.leader.http, "See them at the leader") : null;
    put($("tenants"), empty("The leader alone knows what tenants use", there ? el("p", {}, there) : null));
    $("tenants-filter").closest("label").hidden = true;
    return;
  }
  if (!status.tenants.length) {
    put($("tenants"), empty("No tenant has a policy, or holds anything", el("p", {}, "Engines name a tenant by the salt of their blocks. To limit one, or to keep memory for it:"),
      el("pre", {}, `kvstrata tenant set NAME --dram 4GiB --dram-floor 1GiB`)));
    return;
  }
  const [rows, more] = cut("tenants", status.tenants, filter, (tenant) => tenant.name);
  put($("tenants"), table("Tenants", [["tenant", "main"], ["state", "state"], ["memory", "wide"], ["SSD", "wide"], ["refused, last minute", "num all"]],
    rows.map((tenant) => {
      const [kind, words] = STATES[tenant.state];
      return [
        [name(tenant.name), tenant.policy ? null : el("span", { class: "sub" }, "by the default")],
        badge(kind, words), usage(tenant.dram, "limit", tenant.dram.limit, tenant.dram.floor), usage(tenant.ssd, "limit", tenant.ssd.limit, tenant.ssd.floor),
        tenant.refused_bytes_last_minute ? bytes(tenant.refused_bytes_last_minute) : "–",
      ];
    })), more, status.tenants_left_out ? el("p", { class: "small" }, `${status.tenants_left_out} more are not shown: kvstrata tenant list`) : null);
}

// ---------------------------------------------------------------- the rest

function events(status) {
  if (!status.events.length) {
    put($("events"), empty("Nothing has happened", el("p", {}, "Nodes that come and go, leaders, quotas and refusals are told here, since this master’s start.")));
    return;
  }
  put($("events"), el("ol", { class: "events" }, ...status.events.slice(-40).reverse().map((event) => el("li", { class: event.severity },
    el("time", { datetime: new Date(event.at * 1000).toISOString(), title: moment(event.at) }, ago(status.at - event.at)),
    el("span", { class: "level" }, event.severity === "info" ? "" : event.severity),
    el("span", { class: "what", dir: "auto" }, event.text, event.times > 1 ? ` (${event.times} times)` : null)))));
}

function masters(status) {
  put($("masters"), table("Masters", [["channel", "main"], ["role", "one"], ["page", "one"]], status.masters.map((master) => [
    [name(master.channel), master.self ? el("span", { class: "sub" }, "this one") : null],
    badge(master.leading ? "good" : "info", master.leading ? "leads" : "stands by"),
    master.self ? "here" : link(master.http, "open") ?? "–",
  ])));
}

function copies(status) {
  const { copies: row, transfers } = status;
  const facts = [["orders under way", count(row.under_way)], ["copied now", rate(transfers.bytes_copied_per_second)], ["blocks waiting", count(row.waiting)], ["replicas missing", count(row.replicas_wanting)], ["replicas too many", count(row.replicas_surplus)]];
  const drains = status.nodes.filter((node) => node.drain);
  put($("copies"), el("dl", {}, ...facts.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)])),
    ...drains.map((node) => el("div", { class: "span" }, el("h3", {}, name(node.node_id), ` ${node.drain.state}`),
      bar([{ share: node.drain.bytes_total ? node.drain.bytes_moved / node.drain.bytes_total : 0, kind: "dram" }], `${bytes(node.drain.bytes_moved)} of ${bytes(node.drain.bytes_total)} moved`),
      el("p", { class: "small" }, `${bytes(node.drain.bytes_moved)} of ${bytes(node.drain.bytes_total)} moved, ${bytes(node.drain.bytes_failed)} failed`))));
}

function clients(status) {
  if (!status.clients.length) {
    put($("clients"), empty("No client is connected", el("p", {}, "An engine names this master: ", code(`Client("${status.master.channel}")`))));
    return;
  }
  put($("clients"), table("Clients", [["client", "main"], ["host", ""], ["lookups", "num"], ["idle", "num"]], status.clients.slice(0, ROWS).map((client) => [
    name(client.name || `pid ${client.pid}`), name(`${client.host} (${client.pid})`), count(client.lookups), ago(client.idle_seconds),
  ])), status.clients.length + status.clients_left_out > ROWS ? el("p", { class: "small" }, `${status.totals.clients} in all.`) : null);
}
