// The live page: asks /ledger/live once a second and draws what it says. No library, no other host.

import { areas, bars, blockMap, legend, lines, stackedBar, stepChart, element } from "./draw.js";

const HISTORY = 180; // seconds kept for the charts
const GROUPS = {
  edge: ["auth", "http_read", "tokenize", "wire"],
  waiting: ["wait_step_boundary", "wait_slot", "wait_kv", "wait_budget", "wait_policy", "wait_grammar"],
  displaced: ["preempted", "swap_out", "swapped", "swap_in"],
  resident: ["prefill", "recompute", "resident_unscheduled", "engine_gap", "decode"],
  tail: ["overshoot", "detokenize", "stream", "client_slow"],
};
const HUES = { edge: 275, waiting: 30, displaced: 350, resident: 212, tail: 150 };
const ORDER = Object.values(GROUPS).flat();
const byId = (id) => document.getElementById(id);

let secret = sessionStorage.getItem("key") || "";
let history = [];
let first = null;
let timer = 0;

export function colour(state) {
  for (const [group, states] of Object.entries(GROUPS)) {
    const at = states.indexOf(state);
    if (at >= 0) return `hsl(${HUES[group]} ${62 - 4 * at}% ${38 + (34 * at) / Math.max(states.length - 1, 1)}%)`;
  }
  return "gray";
}

function headers() {
  return secret ? { Authorization: `Bearer ${secret}` } : {};
}

function duration(ns) {
  const ms = ns / 1e6;
  if (ms < 1) return `${Math.round(ns / 1e3)} µs`;
  if (ms < 1000) return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

async function poll() {
  try {
    const response = await fetch("ledger/live", { headers: headers() });
    byId("key").hidden = response.status !== 401;
    byId("main").hidden = response.status === 401;
    if (response.status === 401) return say("a key is needed", true);
    if (!response.ok) return say(`the server answers ${response.status}`, true);
    show(await response.json());
  } catch (error) {
    say("the server does not answer", true);
  } finally {
    timer = setTimeout(poll, document.hidden ? 5000 : 1000);
  }
}

function say(text, bad = false) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
}

function show(live) {
  byId("model").textContent = live.model;
  for (const part of document.querySelectorAll(".operator")) part.hidden = !live.operator;
  lives(byId("slowest"), live.slowest);
  if (!live.operator) {
    byId("tiles").hidden = true;
    return say(`requests of ${live.tenant}`);
  }
  const status = live.status;
  if (!status) return say("the engine has not reported yet", true);
  say(status.detail || (status.busy ? "working" : "idle"), Boolean(status.detail));
  history.push({ at: performance.now() / 1000, status, accounts: live.accounts_s });
  history = history.slice(-HISTORY);
  first ||= live.accounts_s;
  tiles(live);
  charts(live);
  lives(byId("running"), live.running);
}

function rate(name, i) {
  const [a, b] = [history[i - 1], history[i]];
  if (!a) return 0;
  return Math.max(0, (b.status.counters[name] - a.status.counters[name]) / (b.at - a.at));
}

function quantile({ bounds, counts }, q) {
  const total = counts.reduce((a, b) => a + b, 0);
  let seen = 0;
  for (let i = 0; i < counts.length; i++) {
    seen += counts[i];
    if (total && seen >= q * total) return i < bounds.length ? bounds[i] * 1e9 : Infinity;
  }
  return null;
}

function tiles(live) {
  const s = live.status, last = history.length - 1;
  const recent = (name) => {
    const span = Math.min(5, last);
    let sum = 0;
    for (let i = last - span + 1; i <= last; i++) sum += rate(name, i);
    return span ? Math.round(sum / span) : 0;
  };
  const at = (histogram, q) => {
    const ns = quantile(histogram, q);
    if (ns === Infinity) return `> ${duration(histogram.bounds.at(-1) * 1e9)}`;
    return ns === null ? "–" : `≤ ${duration(ns)}`;
  };
  const values = [
    ["input tokens/s", recent("prompt_tokens").toLocaleString()],
    ["output tokens/s", recent("generation_tokens").toLocaleString()],
    ["running", s.running],
    ["waiting", s.waiting],
    ["KV in use", `${((100 * s.blocks_active) / Math.max(s.blocks_total, 1)).toFixed(0)} %`],
    ["first token, half", at(live.ttft, 0.5)],
    ["first token, 99 %", at(live.ttft, 0.99)],
    ["between tokens, half", at(live.itl, 0.5)],
    ["preemptions", s.counters.preemptions],
  ];
  byId("tiles").replaceChildren(
    ...values.map(([name, value]) => element("div", { class: "tile" }, element("b", {}, String(value)), element("span", {}, name))),
  );
}

function charts(live) {
  const all = history.map((_, i) => i);
  const width = Math.min(HISTORY, Math.max(30, history.length));
  lines(byId("throughput"), [
    { name: "input", colour: "var(--warm)", values: all.map((i) => rate("prompt_tokens", i)) },
    { name: "output", colour: "var(--accent)", values: all.map((i) => rate("generation_tokens", i)) },
  ], width);
  const reasons = [...new Set(history.flatMap((h) => Object.keys(h.status.waiting_by_reason)))].sort();
  areas(byId("queue"), [
    { name: "running", colour: colour("decode"), values: history.map((h) => h.status.running) },
    ...reasons.map((r) => ({ name: r, colour: colour(r), values: history.map((h) => h.status.waiting_by_reason[r] || 0) })),
  ], width);
  accounts(live.accounts_s);
  const told = (name, words) => (live.steps.some((step) => step[name]) ? words : "");
  byId("steps-text").textContent =
    `device time and the gap before it${told("expected_ns", "; the line is what is expected")}${told("floor_ns", "; the dashes are the floor")}`;
  stepChart(byId("steps"), live.steps, duration);
  blockMap(byId("blocks"), byId("blocks-key"), live.blocks);
  const s = live.status, slots = live.blocks.fold > 1 ? `, ${live.blocks.fold} a cell` : "";
  byId("blocks-text").textContent =
    `${s.blocks_active} in use, ${s.blocks_cached} cached, ${s.blocks_free - s.blocks_cached} clean of ${s.blocks_total}${slots}`;
  bars(byId("ttft"), live.ttft, duration);
  bars(byId("itl"), live.itl, duration);
}

// Time by state and by tenant that grew since `then`, each of them keyed "state/tenant".
function growth(now, then) {
  const states = {}, tenants = {};
  for (const [name, value] of Object.entries(now)) {
    const [state, tenant] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
    const since = value - (then[name] || 0) || 0;
    states[state] = (states[state] || 0) + since;
    tenants[tenant] = (tenants[tenant] || 0) + since;
  }
  return { states, tenants, any: Object.values(states).some((v) => v > 0) };
}

function accounts(now) {
  const opened = growth(now, first), ever = growth(now, {});
  const { states, tenants } = opened.any ? opened : ever;
  const said = opened.any || !ever.any ? "since this page was opened" : "since the server started: nothing has run since this page was opened";
  for (const hint of document.querySelectorAll(".since")) hint.textContent = said;
  shares(byId("accounts"), ORDER, states, colour);
  const names = Object.keys(tenants).sort((a, b) => tenants[b] - tenants[a]).slice(0, 12);
  shares(byId("tenants"), names, tenants, (name) => `hsl(${(names.indexOf(name) * 67 + 210) % 360} 55% 52%)`);
}

function shares(into, order, values, hue) {
  if (!order.some((name) => values[name] > 0)) return into.replaceChildren(element("p", { class: "hint" }, "nothing yet"));
  return into.replaceChildren(stackedBar(order, values, hue, (v) => duration(v * 1e9)), legend(order, values, hue));
}

function lives(list, records) {
  list.replaceChildren(...(records || []).map((record) => life(record)));
}

function life(record) {
  const words = [
    element("code", {}, record.id),
    element("span", {}, record.outcome || record.state),
    element("span", {}, duration(record.total_ns)),
    element("span", {}, `${record.tokens.prompt} + ${record.tokens.generated} tokens`),
    element("span", {}, `${duration(record.cost_ns)} of device time`),
  ];
  if (record.ttft_ns) words.push(element("span", {}, `first after ${duration(record.ttft_ns)}`));
  if (record.slowest_gap_ns) words.push(element("span", {}, `longest gap ${duration(record.slowest_gap_ns)}`));
  const shown = ORDER.filter((s) => (record.buckets_ns[s] || 0) > 0.02 * record.total_ns);
  return element("li", {}, element("p", {}, ...words), stackedBar(ORDER, record.buckets_ns, colour, duration), legend(shown, record.buckets_ns, colour));
}

// A prompt of one's own

let running = null;

async function ask(event) {
  event.preventDefault();
  running?.abort();
  running = new AbortController();
  const prompt = byId("prompt").value, max_tokens = Number(byId("tokens").value);
  byId("answer").textContent = "";
  byId("ledger").replaceChildren();
  byId("stop").disabled = false;
  try {
    const common = { max_tokens, stream: true, return_ledger: true };
    let response = await send("v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }] });
    if (response.status === 400) response = await send("v1/completions", { ...common, prompt });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await read(response);
  } catch (error) {
    byId("answer").append(error.name === "AbortError" ? " (stopped)" : ` ${error.message}`);
  } finally {
    byId("stop").disabled = true;
  }
}

function send(path, body) {
  return fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: running.signal,
  });
}

async function read(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) byId("answer").append(choice.delta ? choice.delta.content || "" : choice.text);
      if (chunk.ledger) lives(byId("ledger"), [{ id: chunk.id, outcome: "this one", ...chunk.ledger }]);
    }
  }
}

byId("try").addEventListener("submit", ask);
byId("stop").addEventListener("click", () => running?.abort());
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try").requestSubmit();
});
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  secret = byId("secret").value;
  sessionStorage.setItem("key", secret);
  clearTimeout(timer);
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) {
    clearTimeout(timer);
    poll();
  }
});
poll();
