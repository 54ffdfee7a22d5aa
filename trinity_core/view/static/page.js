// Runs, tabs and keys.
import { attempt, byId, get, options } from "./dom.js";
import * as groups from "./groups.js";
import * as samples from "./samples.js";
import { setColour } from "./tokens.js";

const COLOURS = ["logprob", "mask", "advantage", "version", "plain"];
let runs = {};

function showTab(name) {
  for (const tab of document.querySelectorAll("[data-tab]")) {
    tab.setAttribute("aria-selected", tab.dataset.tab === name);
    byId(tab.dataset.tab).hidden = tab.dataset.tab !== name;
  }
  byId("colours").hidden = name !== "experiences";
}

async function showRun(name) {
  byId("run").value = name;
  groups.showRun(name, runs[name]);
  samples.showRun(name, runs[name]);
  showTab(runs[name].store ? "experiences" : "samples");
  await Promise.all([runs[name].store ? groups.list() : null, samples.load()]);
}

const start = attempt(async () => {
  runs = await get("runs");
  const names = Object.keys(runs);
  const asked = new URLSearchParams(location.hash.slice(1));
  options(byId("run"), names, names[0]);
  byId("run").disabled = names.length < 2;
  await showRun(names.includes(asked.get("run")) ? asked.get("run") : (names.find((name) => runs[name].store) ?? names[0]));
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
  if (event.target.name === "source") samples.chooseSteps();
  if (event.target.name === "show") samples.draw();
  else samples.load();
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

setColour("logprob");
start();
