// The page of samples on disk: one step of a source, or two steps beside each other.
import { attempt, byId, fact, get, kind, make, options, shown } from "./dom.js";

const MOST = 200;
let run = "";
let steps = {};
let pairs = [];

export function showRun(name, about) {
  run = name;
  steps = about.samples;
  options(byId("versions").source, Object.keys(steps), Object.keys(steps)[0]);
  chooseSteps();
}

export function chooseSteps() {
  const form = byId("versions");
  const known = (steps[form.source.value] ?? []).map(String);
  options(form.step, known, known.length > 1 ? known[0] : known.at(-1));
  options(form.beside, known, known.length > 1 ? known.at(-1) : "", "nothing");
}

export const load = attempt(async () => {
  const form = byId("versions");
  if (!form.source.value) return byId("pairs").replaceChildren(make("p", { class: "quiet" }, "This run has no samples on disk."));
  const where = `runs/${encodeURIComponent(run)}/samples/${encodeURIComponent(form.source.value)}/${form.step.value}`;
  pairs = (await get(where, { beside: form.beside.value })).pairs;
  draw();
});

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
    ? `${pairs.length} tasks: ${better} better, ${worse} worse on the right; a sample of the set, not all of it`
    : `${pairs.length} rollouts; a sample of the set, not all of it`;
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
    side(left, form.step.value), ...(two ? [side(right, form.beside.value)] : []));
}

function side(sample, step) {
  if (!sample) return make("div", {}, make("h3", {}, `step ${step}`), make("p", { class: "quiet" }, "not sampled"));
  const parts = Object.entries(sample.parts).slice(0, 8).map(([name, value]) => fact(name, shown(value)));
  return make("div", {}, make("h3", {}, `step ${step}`),
    make("p", { class: "facts" }, fact("reward", shown(sample.reward), kind(sample.reward)), ...parts), make("pre", {}, sample.response));
}
