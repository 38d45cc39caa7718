// Charts as SVG, a block map on a canvas, bars as boxes. Text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const [W, H, LEFT, BOTTOM] = [420, 150, 58, 16]; // LEFT holds "100.0 s" and "636 ms" in 11 px

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function frame(top, label, words = short) {
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  for (const part of [0, 0.5, 1]) {
    const y = 6 + (H - BOTTOM - 6) * (1 - part);
    svg.append(shape("line", { x1: LEFT, x2: W, y1: y, y2: y, stroke: "var(--line)" }));
    svg.append(shape("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, words(top * part)));
  }
  return svg;
}

function short(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 10 || value === 0 ? String(Math.round(value)) : value.toFixed(1);
}

const up = (value, top) => 6 + (H - BOTTOM - 6) * (1 - value / top);

function across(i, count, width) {
  return W - ((count - 1 - i) / Math.max(width - 1, 1)) * (W - LEFT);
}

function names(series) {
  return element("div", { class: "legend" }, ...series.map((s) => entry(s.name, s.colour)));
}

function entry(name, colour, value = "") {
  const mark = element("i", {});
  mark.style.background = colour;
  return element("span", {}, mark, value ? `${name} ${value}` : name);
}

export function lines(into, series, width) {
  const top = Math.max(1, ...series.flatMap((s) => s.values));
  const svg = frame(top, series.map((s) => `${s.name} ${short(s.values.at(-1) || 0)}`).join(", "));
  for (const { values, colour } of series) {
    const points = values.map((v, i) => `${across(i, values.length, width)},${up(v, top)}`).join(" ");
    svg.append(shape("polyline", { points, fill: "none", stroke: colour, "stroke-width": 2, "vector-effect": "non-scaling-stroke" }));
  }
  into.replaceChildren(svg, names(series));
}

export function areas(into, series, width) {
  const count = series[0].values.length;
  const sums = Array(count).fill(0);
  for (const { values } of series) values.forEach((v, i) => (sums[i] += v));
  const top = Math.max(1, ...sums);
  const svg = frame(top, series.map((s) => `${s.name} ${s.values.at(-1) || 0}`).join(", "));
  const base = Array(count).fill(0);
  for (const { values, colour } of series) {
    const lower = base.map((b, i) => `${across(i, count, width)},${up(b, top)}`).reverse();
    values.forEach((v, i) => (base[i] += v));
    const upper = base.map((b, i) => `${across(i, count, width)},${up(b, top)}`);
    svg.append(shape("polygon", { points: [...upper, ...lower].join(" "), fill: colour }));
  }
  into.replaceChildren(svg, names(series));
}

export function bars(into, { bounds, counts }, duration) {
  const from = counts.findIndex((c) => c > 0);
  if (from < 0) return into.replaceChildren(element("p", { class: "hint" }, "nothing yet"));
  const to = counts.findLastIndex((c) => c > 0);
  const shown = counts.slice(from, to + 1), top = Math.max(...shown);
  const svg = frame(top, "histogram");
  const step = (W - LEFT) / shown.length;
  shown.forEach((count, i) => {
    const y = up(count, top);
    svg.append(shape("rect", { x: LEFT + i * step + 1, y, width: Math.max(step - 2, 1), height: H - BOTTOM - y, fill: "var(--accent)" }));
  });
  const edge = (i) => (i < bounds.length ? `≤ ${duration(bounds[i] * 1e9)}` : `> ${duration(bounds.at(-1) * 1e9)}`);
  svg.append(shape("text", { x: LEFT, y: H - 3 }, edge(from)));
  if (to > from) svg.append(shape("text", { x: W, y: H - 3, "text-anchor": "end" }, edge(to)));
  return into.replaceChildren(svg);
}

export function stepChart(into, steps, duration) {
  if (!steps.length) return into.replaceChildren(element("p", { class: "hint" }, "no step yet"));
  const late = (s) => s.span_ns - s.device_ns - (s.gaps_ns.no_work || 0);
  const sorted = steps.map((s) => s.device_ns + late(s)).sort((a, b) => a - b);
  const top = Math.max(1, sorted[Math.floor(0.98 * (sorted.length - 1))] * 1.15);
  const svg = frame(top, "time of the last steps", duration);
  const step = (W - LEFT) / Math.max(steps.length, 30);
  const clip = (v) => Math.min(v, top);
  steps.forEach((s, i) => {
    const x = LEFT + i * step, width = Math.max(step - 0.6, 0.6);
    const box = (from, to, fill) =>
      svg.append(shape("rect", { x, width, y: up(clip(to), top), height: Math.max(0, up(clip(from), top) - up(clip(to), top)), fill }));
    const { prefill, recompute, decode } = s.tokens;
    const share = (s.device_ns * (prefill + recompute)) / Math.max(prefill + recompute + decode, 1);
    box(0, share, "var(--warm)");
    box(share, s.device_ns, "var(--accent)");
    box(s.device_ns, s.device_ns + late(s), "var(--faint)");
  });
  for (const [name, dash] of [["expected_ns", ""], ["floor_ns", "4 3"]]) {
    const points = steps.map((s, i) => (s[name] ? `${LEFT + (i + 0.5) * step},${up(clip(s[name]), top)}` : null)).filter(Boolean);
    svg.append(shape("polyline", { points: points.join(" "), fill: "none", stroke: "var(--ink)", "stroke-width": 1.2, "stroke-dasharray": dash, "vector-effect": "non-scaling-stroke" }));
  }
  return into.replaceChildren(
    svg,
    names([
      { name: "prompts", colour: "var(--warm)" },
      { name: "decodes", colour: "var(--accent)" },
      { name: "gap", colour: "var(--faint)" },
    ]),
  );
}

const BLOCKS = [["clean", "--line"], ["cached", "--faint"], ["in use", "--accent"], ["shared", "--ink"]];

export function blockMap(canvas, key, { cells }) {
  const style = getComputedStyle(document.documentElement);
  const colours = BLOCKS.map(([, name]) => style.getPropertyValue(name));
  key.replaceChildren(names(BLOCKS.map(([name, colour]) => ({ name, colour: `var(${colour})` }))));
  const ratio = canvas.clientWidth / Math.max(canvas.clientHeight, 1) || 3;
  const columns = Math.max(1, Math.ceil(Math.sqrt(cells.length * ratio)));
  const rows = Math.ceil(cells.length / columns);
  const size = Math.max(2, Math.floor((2 * (canvas.clientWidth || 400)) / columns));
  canvas.width = columns * size;
  canvas.height = rows * size;
  const context = canvas.getContext("2d");
  for (let i = 0; i < cells.length; i++) {
    context.fillStyle = colours[cells.charCodeAt(i) - 48];
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
  }
}

export function stackedBar(order, values, colour, format) {
  const total = order.reduce((sum, name) => sum + (values[name] || 0), 0) || 1;
  const parts = order.filter((name) => values[name] > 0).map((name) => {
    const part = element("i", { title: `${name} ${format(values[name])}` });
    part.style.width = `${(100 * values[name]) / total}%`;
    part.style.background = colour(name);
    return part;
  });
  return element("div", { class: "bar" }, ...parts);
}

export function legend(order, values, colour) {
  const total = Object.values(values).reduce((a, b) => a + b, 0) || 1;
  const shown = order.filter((name) => values[name] > 0).sort((a, b) => values[b] - values[a]);
  return element("div", { class: "legend" }, ...shown.map((name) => entry(name || "(none)", colour(name), `${((100 * values[name]) / total).toFixed(1)} %`)));
}
