// A rollout token by token. Pages of tokens are asked for when they come into sight, so a rollout of any length opens
// at once.
import { attempt, byId, get, make, shown } from "./dom.js";

const PAGE = 2000;  // as in tokens.py
const KINDS = { p: "prompt", a: "in the loss", c: "context, no loss" };
const [ORANGE, GREEN, RED, GREY] = ["226 110 30", "46 160 95", "214 69 65", "128 128 128"];
const rgb = (shade, opacity) => `rgb(${shade} / ${opacity})`;
// Of each colour its legend, and the background of a token of a page; prompt and context have no numbers.
export const COLOURS = {
  logprob: {
    legend: [[rgb(ORANGE, 0.12), "likely"], [rgb(ORANGE, 0.75), "unlikely: log-prob −5 or lower"]],
    background: ({ logprob }, i) => (logprob[i] === null ? "" : rgb(ORANGE, Math.min(1, -logprob[i] / 5) * 0.75)),
  },
  mask: {
    legend: [[rgb(GREEN, 0.3), "in the loss"], [rgb(GREY, 0.28), "context, no loss"]],
    background: ({ kind }, i) => ({ a: rgb(GREEN, 0.3), c: rgb(GREY, 0.28) })[kind[i]] ?? "",
  },
  advantage: {
    legend: [[rgb(GREEN, 0.6), "pushed up"], [rgb(RED, 0.6), "pushed down"]],
    background: ({ advantage }, i, largest) =>
      advantage[i] ? rgb(advantage[i] > 0 ? GREEN : RED, 0.15 + 0.55 * Math.min(1, Math.abs(advantage[i]) / largest)) : "",
  },
  version: {
    legend: [["hsl(67 70% 55% / .35)", "one colour for each policy version that sampled a token"]],
    background: ({ version }, i) => (version[i] === null ? "" : `hsl(${(version[i] * 67) % 360} 70% 55% / .35)`),
  },
  plain: { legend: [], background: () => "" },
};
export let colour = "logprob";

export function setColour(name) {
  colour = name;
  const legend = COLOURS[name].legend.map(([shade, text]) => {
    const swatch = make("i");
    swatch.style.background = shade;
    return make("span", {}, swatch, text);
  });
  byId("legend").replaceChildren(...legend, make("span", { class: "quiet" }, "faint: the prompt; bar: the answer begins"));
  for (const button of byId("colours").children) button.setAttribute("aria-checked", button.dataset.colour === name);
  for (const pane of document.querySelectorAll(".tokens")) pane.paint?.();
}

export function describe(page, i) {
  const logprob = page.logprob[i];
  const parts = [`token ${page.offset + i} of ${page.total}`, `id ${page.ids[i]}`, JSON.stringify(page.text[i]), KINDS[page.kind[i]]];
  if (logprob !== null) parts.push(`log-prob ${logprob.toFixed(4)} (${(100 * Math.exp(logprob)).toPrecision(3)} %)`);
  if (page.version[i] !== null) parts.push(`version ${page.version[i]}`);
  if (page.advantage[i] !== null) parts.push(`advantage ${page.advantage[i].toFixed(4)}`);
  if (page.reward[i]) parts.push(`reward ${shown(page.reward[i])}`);
  if (page.teacher[i] !== null) parts.push(`teacher ${page.teacher[i].toFixed(4)}`);
  return parts.join("   ");
}

function token(page, i) {
  const text = page.text[i];
  const first = page.offset + i === page.prompt_length;
  const span = make("span", { class: `t ${page.kind[i]}${first ? " first" : ""}`, "data-i": i });
  if (text.includes("\n") && text.trim() === "") span.append(make("span", { class: "hidden-text" }, "↵"), text);
  else if (text === "") span.append(make("span", { class: "hidden-text" }, "·"));
  else span.append(text);
  return span;
}

// The scrolling element of one rollout; `where` is the path of its tokens.
export function tokenPane(where, rollout) {
  const total = rollout.prompt_length + rollout.response_length;
  const pane = make("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens" });
  let largest = 1e-9;

  // A page is asked for once; whoever needs its tokens waits for it.
  const load = (chunk) => (chunk.loading ??= attempt(async () => {
    const page = (chunk.page = await get(where, { offset: chunk.dataset.offset }));
    largest = Math.max(largest, ...page.advantage.map((value) => Math.abs(value ?? 0)));
    chunk.replaceChildren(...page.ids.map((_, i) => token(page, i)));
    chunk.classList.remove("waiting");
    pane.paint();
  })());

  pane.paint = () => {
    for (const chunk of pane.children) {
      [...chunk.children].forEach((span, i) => (span.style.background = COLOURS[colour].background(chunk.page, i, largest)));
    }
  };

  const seen = new IntersectionObserver((entries) => entries.filter((e) => e.isIntersecting).forEach((e) => load(e.target)), {
    root: pane, rootMargin: "400px",
  });
  for (let offset = 0; offset < total; offset += PAGE) {
    const chunk = make("div", { class: "chunk waiting", "data-offset": offset });
    pane.append(chunk);
    seen.observe(chunk);
  }

  const chunkOf = (place) => pane.children[Math.floor(place / PAGE)];
  pane.goTo = async (place) => {
    const chunk = chunkOf(place);
    await load(chunk);
    const span = chunk.children[place % PAGE];
    pane.querySelector(".found")?.classList.remove("found");
    span?.scrollIntoView({ block: "center" });
    span?.classList.add("found");
    if (span) byId("status").textContent = describe(chunk.page, place % PAGE);
    pane.place = place;
  };
  pane.nextSurprise = async () => {
    for (let place = (pane.place ?? -1) + 1; place < total; place++) {
      const chunk = chunkOf(place);
      await load(chunk);
      if ((chunk.page?.logprob[place % PAGE] ?? 0) < Math.log(0.1)) return pane.goTo(place);
    }
    byId("status").textContent = "no further token with a probability below 10 %";
  };
  pane.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    pane.goTo(Math.max(0, Math.min(total - 1, (pane.place ?? -1) + by)));
  });
  pane.addEventListener("mouseover", (event) => {
    const span = event.target.closest(".t");
    if (!span) return;
    const text = describe(span.parentElement.page, Number(span.dataset.i));
    byId("status").textContent = text;
    const tip = byId("tip");
    tip.textContent = text.replaceAll("   ", "\n");
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 260)}px`;
    tip.style.top = `${event.clientY + 18 + 190 > innerHeight ? event.clientY - 190 : event.clientY + 18}px`;
  });
  pane.addEventListener("mouseleave", () => (byId("tip").hidden = true));
  return pane;
}
