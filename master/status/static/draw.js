// Pieces of the page: elements, numbers in words, bars, sparklines, tables. Data only ever becomes text.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children (strings become text). */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** A name that came from outside: isolated, so that no character of it reorders what stands beside it. */
export function name(text) {
  const shown = String(text);
  return el("span", { class: "name", dir: "auto", title: shown.length > 24 ? shown : null }, shown);
}

export function code(text) {
  return el("code", {}, text);
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

/** Make what is in `node` look like `children`, changing only what differs: focus, a selection, and what a screen
 *  reader is at stay where they are. Listeners of `children` are lost; the page listens above them. */
export function put(node, ...children) {
  const fresh = el("div", {}, ...children);
  morphChildren(node, fresh);
}

function morphChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((child, at) => {
    const there = old.childNodes[at];
    if (there === undefined) old.append(child);
    else if (there.nodeName !== child.nodeName) there.replaceWith(child);
    else if (child.nodeType === Node.TEXT_NODE) {
      if (there.data !== child.data) there.data = child.data;
    } else {
      morphAttributes(there, child);
      morphChildren(there, child);
    }
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function morphAttributes(old, fresh) {
  for (const { name: key } of [...old.attributes]) if (!fresh.hasAttribute(key)) old.removeAttribute(key);
  for (const { name: key, value } of fresh.attributes) if (old.getAttribute(key) !== value && key !== "style") old.setAttribute(key, value);
  if (fresh.style !== undefined && old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
}

// ---------------------------------------------------------------- numbers

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  let unit = 0;
  let left = Number(value) || 0;
  while (left >= 1024 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit && left < 9.95 ? left.toFixed(1) : Math.round(left)} ${UNITS[unit]}`;
}

export const rate = (value) => `${bytes(value)}/s`;

export function count(value) {
  const number = Number(value) || 0;
  if (number < 1e4) return String(Math.round(number));
  if (number < 1e6) return `${(number / 1e3).toFixed(number < 1e5 ? 1 : 0)} k`;
  return number < 1e9 ? `${(number / 1e6).toFixed(1)} M` : `${(number / 1e9).toFixed(1)} G`;
}

export function percent(part) {
  if (part === null || part === undefined || Number.isNaN(part)) return "–";
  const value = part * 100;
  return value > 0 && value < 9.95 ? `${value.toFixed(1)} %` : `${Math.round(value)} %`;
}

export function ago(seconds) {
  const s = Math.max(0, Number(seconds) || 0);
  if (s < 10) return `${s.toFixed(s < 1 ? 1 : 0)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
}

/** A time as the reader's own clock shows it. */
export const moment = (unix) => new Date(unix * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });

// ---------------------------------------------------------------- pictures

/** A bar of parts: [{share 0..1, kind}], with words for those who do not see it. */
export function bar(parts, words, mark = null) {
  const made = el("span", { class: "bar", role: "img", "aria-label": words });
  for (const { share, kind } of parts) {
    const part = el("span", { class: `part ${kind}` });
    part.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
    made.append(part);
  }
  if (mark !== null) {
    const line = el("span", { class: "floor" });
    line.style.left = `${Math.max(0, Math.min(1, mark)) * 100}%`;
    made.append(line);
  }
  return made;
}

/** The last hour as a line; null where nothing is known. `top`: the value at the upper edge, else the greatest. */
export function sparkline(values, words, top = null) {
  const width = 120;
  const height = 28;
  const known = values.filter((value) => value !== null);
  const most = Math.max(top ?? 0, ...known, 1e-9);
  const place = (value, at) => [
    ((at / Math.max(1, values.length - 1)) * width).toFixed(1),
    (height - 2 - (value / most) * (height - 4)).toFixed(1),
  ];
  const runs = [];
  let run = [];
  values.forEach((value, at) => {
    if (value === null) {
      if (run.length) runs.push(run);
      run = [];
    } else run.push(place(value, at));
  });
  if (run.length) runs.push(run);
  const made = svg("svg", {
    class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": words,
  });
  made.append(svg("line", { class: "ground", x1: 0, x2: width, y1: height - 1, y2: height - 1 }));
  for (const points of runs) {
    const line = points.map((point) => point.join(",")).join(" ");
    const from = points[0][0];
    const to = points[points.length - 1][0];
    if (points.length === 1) {
      made.append(svg("line", { class: "line", x1: from - 2, x2: to, y1: points[0][1], y2: points[0][1] }));
      continue;
    }
    made.append(svg("polygon", { class: "area", points: `${from},${height - 1} ${line} ${to},${height - 1}` }));
    made.append(svg("polyline", { class: "line", points: line }));
  }
  return made;
}

export function badge(kind, words) {
  return el("span", { class: `badge ${kind}` }, words);
}

// ---------------------------------------------------------------- tables

/** A table that becomes cards on a narrow screen: roles stay, since `display` takes the built-in ones away.
 *  columns: [[title, class]]; rows: [[cell, ...]] where a cell is a string, a node or a list of them. */
export function table(label, columns, rows) {
  const head = el("tr", { role: "row" });
  for (const [title, kind] of columns) head.append(el("th", { role: "columnheader", scope: "col", class: kind }, title));
  const body = el("tbody", { role: "rowgroup" });
  for (const cells of rows) {
    const row = el("tr", { role: "row" });
    cells.forEach((cell, at) => {
      const [title, kind] = columns[at];
      const first = at === 0;
      const made = el(first ? "th" : "td", {
        role: first ? "rowheader" : "cell", scope: first ? "row" : null, class: kind, "data-label": title,
      });
      made.append(...[cell].flat().filter((part) => part !== null));
      row.append(made);
    });
    body.append(row);
  }
  return el("table", { role: "table", "aria-label": label }, el("thead", { role: "rowgroup" }, head), body);
}

export function empty(title, ...lines) {
  return el("div", { class: "empty" }, el("p", { class: "empty-title" }, title), ...lines);
}
