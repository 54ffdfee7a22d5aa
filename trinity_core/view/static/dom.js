// Elements and requests. Text reaches the page as text nodes only: nothing here makes HTML from a string.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function fact(name, value, kind = "") {
  return make("span", { class: kind }, `${name} `, make("b", {}, value));
}

export function options(select, values, chosen, all, label = String) {
  const listed = values.map((value) => make("option", { value }, label(value)));
  select.replaceChildren(...(all === undefined ? [] : [make("option", { value: "" }, all)]), ...listed);
  select.value = chosen ?? "";
}

export const shown = (value) => (value === null || value === undefined ? "–" : Number.isInteger(value) ? String(value) : value.toFixed(3));

export const kind = (reward) => (reward === null || reward === undefined ? "quiet" : reward > 0 ? "good" : "bad");

const REPEATED = ["response_length", "truncated"];  // numbers of a rollout that tables and filters have by themselves

// A reward's part of 0 says that an answer was judged; faults, which are rare, are named where there are any.
const FAULTS = /truncated$|_errors(\/|$)/;
export const says = (name, value) => value !== undefined && !REPEATED.includes(name) && (value !== 0 || !FAULTS.test(name));

let waiting = 0;
function waits(by) {
  waiting += by;
  byId("loading").hidden = waiting === 0;
}

export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  waits(1);
  let answer, body;
  try {
    answer = await fetch(`api/${path}${query ? `?${query}` : ""}`);
    const isJson = answer.headers.get("content-type")?.startsWith("application/json");
    body = isJson ? await answer.json() : { detail: `The server failed (${answer.status}): see its log.` };
  } finally {
    waits(-1);
  }
  if (!answer.ok) throw new Error(typeof body.detail === "string" ? body.detail : JSON.stringify(body.detail));
  return body;
}

export const ofRun = (path) => `runs/${encodeURIComponent(byId("run").value)}/${path}`;

export function attempt(action) {
  // Show an error on the page until a request succeeds again.
  return async (...given) => {
    try {
      const result = await action(...given);
      byId("problem").hidden = true;
      return result;
    } catch (error) {
      byId("problem").textContent = error.message;
      byId("problem").hidden = false;
    }
  };
}
