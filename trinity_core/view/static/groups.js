// One group of the table: one rollout token by token, or two beside each other.
import { attempt, byId, fact, get, kind, make, ofRun, says, shown } from "./dom.js";
import { beside } from "./table.js";
import { tokenPane } from "./tokens.js";

let remember, showTask;
// `write` keeps what is shown in the address; `task` shows the groups of a task.
export const connect = (write, task) => ([remember, showTask] = [write, task]);
export const place = { group: null, rollout: 0 };
let group = null;
let kept = null;

export function forget() {
  kept = group = place.group = null;
  place.rollout = 0;
  byId("group").replaceChildren(make("p", { class: "quiet" }, "The table has no rollouts (r)."));
}

export const open = attempt(async (id, rollout = 0) => {
  place.group = id;
  const { source, other } = byId("rows");
  const where = source.value ? `samples/${encodeURIComponent(source.value)}` : "groups";
  const found = await get(ofRun(`${where}/${id}`), { other: other.disabled ? "" : other.value });
  if (place.group !== id) return;
  group = found;
  choose(Math.min(rollout, Math.max(0, group.rollouts.length - 1)));
});

function choose(number) {
  place.rollout = number;
  byId("status").textContent = "";
  remember();
  const one = group.rollouts[number];
  const panes = one ? [pane(group, number)] : [make("p", { class: "quiet" }, gone(group))];
  // Samples of a task stand beside its first one.
  const left = kept ?? (group.source && { group, number: 0 });
  if (left && one && !(left.group.id === group.id && left.number === number)) panes.unshift(pane(left.group, left.number, true));
  byId("group").replaceChildren(...head(), make("div", { class: "panes" }, ...panes));
}

function gone(each) {
  if (each.failure) return `This task failed after ${each.tries} tries: ${each.failure}`;
  if (each.state === "dropped") return `Operators dropped all rollouts of this task: ${JSON.stringify(each.dropped)}`;
  return "The rollouts of this group have left the store, and buffer/experience_buffer.jsonl does not have them.";
}

function head() {
  const explored = () => [
    fact("group", group.group || `#${group.id}`), fact("explore step", group.step),
    group.oldest === group.newest ? fact("version", group.newest) : fact("versions", `${group.oldest} – ${group.newest}`),
    fact("state", group.state),
    ...(group.train_steps.length ? [fact(group.train_steps.length > 1 ? "in the batches of steps" : "in the batch of step", group.train_steps.join(", "))] : []),
  ];
  const facts = make("p", { class: "facts" }, fact("task", group.task ?? "–"), ...(group.source ? [] : explored()));
  const buttons = group.rollouts.map((each, i) =>
    make("button", { "aria-pressed": i === place.rollout, onclick: () => choose(i) },
      `${each.label ?? each.run}${each.turn ? `.${each.turn}` : ""}: `, make("span", { class: kind(each.reward) }, shown(each.reward))));
  const tools = [
    make("button", { onclick: () => step(-1), title: "Previous group of the table (k)", "aria-label": "previous group" }, "‹"),
    make("button", { onclick: () => step(1), title: "Next group of the table (j)", "aria-label": "next group" }, "›"),
    ...(group.source ? [] : [make("button", { onclick: sameTask, title: "All groups of this task (t)" }, "all groups of this task")]),
    make("button", { onclick: keep, title: "Keep this rollout on the left, beside others (b)", "aria-pressed": kept !== null }, "keep on the left"),
  ];
  return [facts, make("div", { class: "rollouts" }, make("span", { class: "quiet" }, "rollout, reward:"), ...buttons, make("span", { class: "grow" }), ...tools)];
}

function pane(owner, number, left = false) {
  const one = owner.rollouts[number];
  const parts = Object.entries(one.metrics).filter((part) => says(...part)).slice(0, 12);
  const facts = make("p", { class: "facts" },
    ...(left || one.label ? [make("b", {}, `${owner.task ?? owner.group}, ${one.label ?? `step ${owner.step}`}`)] : []),
    ...(one.label ? [] : [fact("rollout", one.run)]), fact("reward", shown(one.reward), kind(one.reward)),
    ...(one.label ? [] : [fact("advantage", shown(one.advantage)),
      fact("version", one.oldest === one.newest ? shown(one.newest) : `${one.oldest} – ${one.newest}`)]),
    ...(one.prompt_length ? [fact("tokens", `${one.prompt_length} prompt, ${one.response_length} answer${one.archived ? "" : `, ${one.actions} in the loss`}`)] : []),
    ...(one.truncated ? [make("b", { class: "bad" }, "cut off")] : []), ...(one.is_expert ? [make("b", {}, "expert")] : []),
    ...parts.map(([name, value]) => fact(name, shown(value))));
  const tokens = one.archived ? texts(one) : tokenPane(ofRun(`groups/${owner.id}/rollouts/${number}/tokens`), one);
  return make("div", { class: left ? "pane left" : "pane" }, facts, ...(one.truth ? [reference(one)] : []), tokens);
}

// The reference answer, with what the rollout's answer lacks marked.
function reference(one) {
  const words = one.words.map(([word, has]) => [has ? word : make("mark", { title: "not in the answer" }, word), " "]);
  return make("details", { class: "reference", open: "" }, make("summary", { class: "quiet" }, "reference answer (red: missing in the rollout)"), ...words.flat());
}

function texts(one) {
  return make("div", { class: "texts", tabindex: 0 },
    make("p", { class: "quiet" }, one.label ? "A sample, kept as text." : "Trained on; its tokens have left the store."),
    make("h3", {}, "prompt"), make("pre", {}, one.prompt), make("h3", {}, "answer"), make("pre", {}, one.response));
}

const keep = () => {
  if (!group?.rollouts.length) return;
  kept = kept ? null : { group, number: place.rollout };
  choose(place.rollout);
};

const sameTask = () => group?.task && !group.source && showTask(group.task);

const current = () => byId("group").querySelector(".pane:not(.left) .tokens");

async function step(by) {
  const next = await beside(place.group, by);
  if (next !== undefined) open(next);
}

function turn(by) {
  const count = group?.rollouts.length ?? 0;
  if (count) choose((place.rollout + by + count) % count);
}

export const keys = {
  j: () => step(1), k: () => step(-1), l: () => turn(1), h: () => turn(-1), b: keep, t: sameTask,
  a: () => current()?.goTo(group.rollouts[place.rollout].prompt_length), p: () => current()?.goTo(0),
  n: () => current()?.nextSurprise(),
};
