// Runs, tabs and keys.
import { about, attempt, byId, get, options } from "./dom.js";
import * as groups from "./groups.js";
import * as samples from "./samples.js";
import { setColour } from "./tokens.js";

const COLOURS = ["logprob", "mask", "advantage", "version", "plain"];

function showTab(name) {
  for (const tab of document.querySelectorAll("[data-tab]")) {
    tab.setAttribute("aria-selected", tab.dataset.tab === name);
    byId(tab.dataset.tab).hidden = tab.dataset.tab !== name;
  }
  byId("colours").hidden = name !== "experiences";
}

const showRun = attempt(async (name, tab) => {
  byId("run").value = name;
  const run = await about(name);
  groups.showRun(name, run);
  samples.showRun(name, run);
  showTab(tab ?? (run.store ? "experiences" : "samples"));
  await Promise.all([run.store ? groups.list() : null, samples.load()]);
});

// The address after #: run; group and rollout, or tab=samples and the run to compare with (other).
const start = attempt(async () => {
  const names = await get("runs");
  const asked = new URLSearchParams(location.hash.slice(1));
  options(byId("run"), names, names[0]);
  options(byId("versions").other, names, "", "the same run");
  byId("run").disabled = names.length < 2;
  const run = asked.get("run") ?? names[0];
  if (!names.includes(run)) throw new Error(run ? `There are no rollouts of ${run}.` : "There are no rollouts yet.");
  if (names.includes(asked.get("other"))) byId("versions").other.value = asked.get("other");
  await showRun(run, asked.get("tab") === "samples" ? "samples" : null);
  if (asked.get("group")) await groups.open(Number(asked.get("group")), Number(asked.get("rollout") ?? 0));
});

byId("run").addEventListener("change", (event) => showRun(event.target.value));
byId("more").addEventListener("click", groups.more);
byId("help").addEventListener("click", () => byId("keys").showModal());
document.querySelectorAll("[data-tab]").forEach((tab) => tab.addEventListener("click", () => showTab(tab.dataset.tab)));
byId("colours").addEventListener("click", (event) => event.target.dataset.colour && setColour(event.target.dataset.colour));
for (const form of document.querySelectorAll("main form")) form.addEventListener("submit", (event) => event.preventDefault());

let waiting;
byId("filter").addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(groups.list, 250);
});
byId("versions").addEventListener("change", (event) => {
  if (event.target.name === "show") samples.draw();
  else samples.change(event.target.name);
});

const KEYS = {
  ...groups.keys, e: () => showTab("experiences"), s: () => showTab("samples"), "?": () => byId("keys").showModal(),
  "/": () => byId("filter").group.focus(), ...Object.fromEntries(COLOURS.map((name, i) => [String(i + 1), () => setColour(name)])),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const inField = event.target.matches("input, select");
  if (inField) return event.key === "Escape" ? event.target.blur() : undefined;
  if (!KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});

window.addEventListener("hashchange", start);
setColour("logprob");
start();
