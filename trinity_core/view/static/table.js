// The table of rollouts, filtered and sorted here: those of the newest groups, older ones on demand; or the samples of a
// source, of this run or beside those of another.
import { attempt, byId, get, kind, make, ofRun, options, says, shown } from "./dom.js";

const EXCERPT = 140;
let rows = [];
let listed = [];
let before = null;
let asked = 0;
export const order = { by: "step", down: true };

const COLUMNS = {
  step: (row) => row.step, task: (row) => [row.task ?? "", ...(row.label && byId("rows").other.value ? [row.label] : [])].join(", "), prompt: (row) => row.prompt, answer: (row) => row.response,
  reference: (row) => row.truth, reward: (row) => row.reward, advantage: (row) => row.advantage,
  tokens: (row) => row.response_length,
};
const TEXTS = ["task", "prompt", "answer", "reference"];
const natural = new Intl.Collator("en", { numeric: true }).compare;

export function showRun({ sources, has_store }) {
  rows = [];
  options(byId("rows").source, sources, has_store ? "" : sources[0], has_store ? "training" : undefined, (source) => source.replace(/^(eval|explorer)_?/, (_, stream) => `samples of ${stream === "eval" ? "evaluation " : "training "}`));
  byId("table").querySelector("tbody").replaceChildren();
}

export const list = attempt(async (more = false) => {
  const mine = ++asked;
  const form = byId("rows");
  form.version.disabled = form.state.disabled = form.source.value !== "";
  form.other.disabled = form.source.value === "" || form.other.length < 3;
  const { show, source, ...wanted } = Object.fromEntries(new FormData(form));
  const where = source ? `samples/${encodeURIComponent(source)}` : "rollouts";
  const found = await get(ofRun(where), { ...wanted, before: more ? before : "" });
  if (mine !== asked) return;
  rows = more ? [...rows, ...found.rollouts] : found.rollouts;
  before = found.before;
  draw();
});

function columns() {
  const isColumn = (part) => rows.some((row) => says(part, row.metrics[part]));
  const parts = [...new Set(rows.flatMap((row) => Object.keys(row.metrics)))].filter(isColumn).slice(0, 6);
  return { ...COLUMNS, ...Object.fromEntries(parts.map((part) => [part in COLUMNS ? `${part} (metric)` : part, (row) => row.metrics[part]])) };
}

function wanted() {
  const rewards = Map.groupBy(rows, (row) => row.id);
  const judged = (row) => rewards.get(row.id).map((each) => each.reward).filter((reward) => reward !== null);
  const takes = {
    "": () => true, wrong: (row) => row.reward !== null && row.reward <= 0, truncated: (row) => row.truncated,
    flat: (row) => judged(row).length > 1 && new Set(judged(row)).size === 1, mixed: (row) => new Set(judged(row)).size > 1,
  }[byId("rows").show.value];
  return rows.filter(takes);
}

export function draw() {
  const all = columns();
  const value = all[order.by] ?? all.step;
  const sign = order.down ? -1 : 1;
  const compare = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y || (x ?? null) === (y ?? null)) return 0;
    return (x ?? null) === null ? 1 : (y ?? null) === null ? -1 : sign * (typeof x === "string" ? natural(x, y) : x - y);
  };
  listed = wanted().sort(compare);
  const heads = Object.keys(all).map((name) => {
    const sorted = name === order.by ? (order.down ? "descending" : "ascending") : "none";
    return make("th", { "aria-sort": sorted, class: TEXTS.includes(name) ? "" : "number" },
      make("button", { type: "button", "data-by": name }, name, { ascending: " ↑", descending: " ↓", none: "" }[sorted]));
  });
  const table = byId("table");
  table.querySelector("thead").replaceChildren(make("tr", {}, ...heads));
  table.querySelector("tbody").replaceChildren(...listed.map((row) => make("tr", {},
    ...Object.entries(all).map(([name, of], i) => cell(name, of(row), i === 0 ? row : null)))));
  const count = (some) => some.filter((row) => row.run !== undefined).length;  // a task that failed has a row, but no rollout
  byId("rows-count").textContent = `${listed.length === rows.length ? "" : `${count(listed)} of `}${before === null ? "" : "the newest "}${count(rows)} rollouts`;
  byId("older").hidden = before === null;
}

function cell(name, value, row) {
  if (row) {
    const { source, other } = byId("rows");
    const from = source.value ? { source: source.value, ...(other.value && { other: other.value }) } : {};
    const address = `#${new URLSearchParams({ run: byId("run").value, ...from, group: row.id, rollout: row.place })}`;
    return make("td", { class: "number" }, make("a", { href: address, title: "Token by token", "aria-label": `step ${value}, ${row.task}, rollout ${row.place}` }, value));
  }
  if (!TEXTS.includes(name)) return make("td", { class: `number ${name === "reward" ? kind(value) : ""}` }, shown(value));
  const text = String(value);
  return make("td", { class: name === "task" ? "" : "text", title: text.slice(0, 2000) }, text.length > EXCERPT ? `… ${text.slice(-EXCERPT)}` : text);
}

// The group some places after (or before) another in the table, which loads older ones at its end.
export async function beside(id, by) {
  const groups = () => [...new Set(listed.map((row) => row.id))];
  const at = groups().indexOf(id) + by;
  if (at >= groups().length && before !== null) await list(true);
  return groups()[Math.max(0, at)];
}

function move(by) {
  const links = [...byId("table").querySelectorAll("tbody a")];
  links[Math.max(0, links.indexOf(document.activeElement) + by)]?.focus();
}
export const keys = { j: () => move(1), k: () => move(-1) };

export const sort = (by) => {
  order.down = by === order.by ? !order.down : !TEXTS.includes(by);
  order.by = by;
  draw();
};
