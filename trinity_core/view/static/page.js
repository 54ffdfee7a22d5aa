// Runs, tabs and keys.
import { attempt, byId, get, ofRun, options } from "./dom.js";
import * as groups from "./groups.js";
import * as table from "./table.js";
import { COLOURS, colour, setColour } from "./tokens.js";

let tab = "table";
let applied = null;

function showTab(name) {
  tab = name;
  for (const each of document.querySelectorAll("[data-tab]")) {
    each.setAttribute("aria-selected", each.dataset.tab === name);
    byId(each.dataset.tab).hidden = each.dataset.tab !== name;
  }
  byId("tip").hidden = true;
  remember();
}

// Tokens are those of the table's first rollout until one is chosen.
const openFirst = () => tab === "experiences" && groups.place.group === null && groups.keys.j();
const visit = (name) => (showTab(name), openFirst());

// The address after # says all that is shown: run, tab, the fields of the table and its order, colour, group and rollout.
function remember() {
  if (applied === null) return;
  const filled = Object.fromEntries([...new FormData(byId("rows"))].filter(([, value]) => value));
  const tokens = tab === "experiences" && { colour, ...(groups.place.group !== null && groups.place) };
  const { by, down } = table.order;
  applied = `#${new URLSearchParams({ run: byId("run").value, tab, ...filled, ...tokens, by, down: Number(down) })}`;
  if (location.hash !== applied) history.replaceState(null, "", applied);
  Object.assign(byId("own"), { href: applied, hidden: window === parent });  // inside Studio the address is not to be seen
}
groups.connect(remember, (task) => {
  byId("rows").reset();
  byId("rows").task.value = task;
  showTab("table");
  return table.list();
});

async function showRun(asked) {
  const run = await get(ofRun("about"));
  groups.forget();
  table.showRun(run);
  if (asked.has("other") && !asked.has("source")) asked.set("source", run.sources[0] ?? "");
  for (const field of byId("rows").elements) {
    if (asked.has(field.name)) field.value = asked.get(field.name);
    if (field.selectedIndex === -1) field.selectedIndex = 0;  // an old address may name a choice that is gone
  }
  if (asked.has("by")) Object.assign(table.order, { by: asked.get("by"), down: asked.get("down") === "1" });
  setColour(Object.hasOwn(COLOURS, asked.get("colour")) ? asked.get("colour") : colour);
  showTab((asked.get("tab") ?? (asked.has("group") && "experiences")) === "experiences" ? "experiences" : "table");
  await table.list();
  if (asked.has("group") && tab === "experiences") await groups.open(Number(asked.get("group")), Number(asked.get("rollout") ?? 0));
  else await openFirst();
  remember();
}

const start = attempt(async () => {
  if (location.hash === applied) return;
  const names = await get("runs");
  const asked = new URLSearchParams(location.hash.slice(1));
  options(byId("run"), names, names[0]);
  options(byId("rows").other, names, "", "no other run");
  byId("run").disabled = names.length < 2;
  const run = asked.get("run") ?? names[0];
  byId("run").value = run ?? "";
  if (!names.includes(run)) throw new Error(run ? `There are no rollouts of ${run}. They appear once its first evaluation or explore step is done.` : "There are no rollouts yet.");
  applied = location.hash;
  await showRun(asked);
});

byId("run").addEventListener("change", attempt(() => showRun(new URLSearchParams())));
byId("older").addEventListener("click", () => table.list(true));
byId("help").addEventListener("click", () => byId("keys").showModal());
document.querySelectorAll("[data-tab]").forEach((each) => each.addEventListener("click", () => visit(each.dataset.tab)));
const recolour = (name) => (setColour(name), remember());
byId("colours").addEventListener("click", (event) => event.target.dataset.colour && recolour(event.target.dataset.colour));
byId("rows").addEventListener("submit", (event) => event.preventDefault());

let waiting;
const soon = (action) => {
  clearTimeout(waiting);
  waiting = setTimeout(() => action().then(remember), 250);
};
byId("rows").addEventListener("input", (event) => {
  if (["source", "other"].includes(event.target.name)) groups.forget();
  if (event.target.name !== "show") return soon(table.list);
  table.draw();
  remember();
});
byId("table").addEventListener("click", (event) => {
  const row = event.target.closest("tbody tr");
  if (row && !event.target.closest("a") && getSelection().isCollapsed) row.querySelector("a").click();
  const by = event.target.closest("[data-by]")?.dataset.by;
  if (!by) return;
  table.sort(by);
  remember();
});

const KEYS = {
  ...Object.fromEntries(Object.entries(groups.keys).map(([key, act]) => [key, () => (tab === "experiences" ? act() : table.keys[key]?.())])),
  r: () => visit("table"), e: () => visit("experiences"), "?": () => byId("keys").showModal(),
  "/": () => (showTab("table"), byId("rows").source.focus()), ...Object.fromEntries(Object.keys(COLOURS).map((name, i) => [String(i + 1), () => recolour(name)])),
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
start();
