// The page of samples on disk: one step of a source, or two steps beside each other.
import { about, attempt, byId, fact, get, kind, make, options, parts, shown } from "./dom.js";

const MOST = 200;
let run = "";
let steps = {};
let otherSteps = {};
let pairs = [];

export function showRun(name, { samples }) {
  run = name;
  steps = samples;
  options(byId("versions").source, Object.keys(steps), Object.keys(steps)[0]);
}

function chooseSteps() {
  const form = byId("versions");
  const own = (steps[form.source.value] ?? []).map(String);
  const others = (otherSteps[form.source.value] ?? []).map(String);
  const another = form.other.value !== "";
  options(form.step, own, own.length > 1 && !another ? own[0] : own.at(-1));
  options(form.beside, others, others.length > 1 || another ? others.at(-1) : "", "nothing");
}

export const change = attempt(async (name) => {
  if (name === "other") return load();
  if (name === "source") chooseSteps();
  await show();
});

export const load = attempt(async (asked = new URLSearchParams()) => {
  const { other } = byId("versions");
  otherSteps = other.value ? (await about(other.value)).samples : steps;
  const { source, step, beside } = byId("versions");
  if (asked.get("source") in steps) source.value = asked.get("source");
  chooseSteps();
  for (const field of [step, beside]) if (asked.has(field.name)) field.value = asked.get(field.name);
  await show();
});

async function show() {
  const form = byId("versions");
  if (!form.source.value) return byId("pairs").replaceChildren(make("p", { class: "quiet" }, "This run has no samples yet: they are kept when an evaluation, or every tenth explore step, is done."));
  const where = `runs/${encodeURIComponent(run)}/samples/${encodeURIComponent(form.source.value)}/${form.step.value}`;
  pairs = (await get(where, { beside: form.beside.value, other: form.other.value })).pairs;
  draw();
}

export function draw() {
  const form = byId("versions");
  const two = form.beside.value !== "";
  const change = ({ left, right }) => (left && right ? (right.reward ?? 0) - (left.reward ?? 0) : 0);
  const takes = {
    all: () => true, better: (pair) => change(pair) > 0, worse: (pair) => change(pair) < 0,
    changed: ({ left, right }) => left?.response !== right?.response,
  }[two ? form.show.value : "all"];
  const wanted = pairs.filter(takes);
  const [better, worse] = [pairs.filter((pair) => change(pair) > 0).length, pairs.filter((pair) => change(pair) < 0).length];
  byId("verdict").textContent = two
    ? `${pairs.length} task${pairs.length === 1 ? "" : "s"}: ${better} better, ${worse} worse on the right; a sample, not the whole set`
    : `${pairs.length} rollout${pairs.length === 1 ? "" : "s"}; a sample, not the whole set`;
  byId("pairs").replaceChildren(...wanted.slice(0, MOST).map((pair) => card(pair, two)),
    ...(wanted.length > MOST ? [make("p", { class: "quiet" }, `${wanted.length - MOST} more are not shown`)] : []));
}

function card({ left, right }, two) {
  const one = left ?? right;
  const form = byId("versions");
  return make("article", { class: "pair" },
    make("div", { class: "both" },
      make("p", { class: "facts" }, fact("task", one.task_index), fact("run", one.run), fact("reference", one.truth.slice(0, 300) || "–")),
      make("pre", { class: "quiet" }, one.prompt)),
    side(left, run, form.step.value), ...(two ? [side(right, form.other.value || run, form.beside.value)] : []));
}

function side(sample, of, step) {
  const title = make("h3", {}, of === run ? `step ${step}` : `${of}, step ${step}`);
  if (!sample) return make("div", {}, title, make("p", { class: "quiet" }, "not sampled"));
  return make("div", {}, title,
    make("p", { class: "facts" }, fact("reward", shown(sample.reward), kind(sample.reward)), ...parts(sample.parts)),
    make("pre", {}, sample.response));
}
