// The page: one conversation, its controls, and what the service says of itself.

import { AnswerView } from "./answer.js";
import { Board } from "./board.js";
import { at, make } from "./element.js";
import { Answer } from "./stream.js";

const READY_EVERY_MS = 4000;
const NARROW = matchMedia("(max-width: 60rem)");
const DARK = matchMedia("(prefers-color-scheme: dark)");

const board = new Board();
const conversation = []; // what the model is told: {role, content}
let answering = null; // the Answer that is being streamed

// ---- the conversation ------------------------------------------------------------------------------------------

/** What the controls ask for. A seed is always sent, so that an answer can be asked for again. */
function asked(messages) {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const body = {
    messages: structuredClone(messages),
    temperature: number("temperature"),
    seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
    max_tokens: number("budget"),
    speculation: { trace: true, max_depth: number("depth") },
  };
  return { body, seed: body.seed, key: at("key").value };
}

async function answer(text) {
  conversation.push({ role: "user", content: text });
  add(make("div", { class: "message user", text }));
  const request = asked(conversation);
  const view = new AnswerView(request, (row) => board.row(row));
  board.begin();
  add(view.element);
  answering = new Answer(request.body, { key: request.key, onLink: (state) => link(view, state) });
  at("send").textContent = "Stop";
  at("log").setAttribute("aria-busy", "true");
  try {
    for await (const chunk of answering.chunks()) {
      view.take(chunk);
      scroll(false);
    }
  } catch (error) {
    if (error.name === "AbortError") view.note("stopped");
    else failed(error);
  }
  const summary = view.close();
  if (view.numbers.text) conversation.push({ role: "assistant", content: view.numbers.text });
  else {
    conversation.pop(); // an answer without text leaves no trace: the question may be asked again
    view.element.remove();
    at("prompt").value ||= text;
    grow();
  }
  answering = null;
  at("send").textContent = "Send";
  at("log").removeAttribute("aria-busy");
  at("announce").textContent = summary ? `Answer finished: ${summary}` : "";
  scroll(false);
}

function link(view, state) {
  view.note(state === "lost" ? "connection lost, looking for it…" : "resumed where it was cut");
}

function failed(error) {
  if (error.status === 401) {
    at("key-label").hidden = false;
    at("key").focus();
  }
  add(make("div", { class: "message error", role: "alert", text: error.message }));
}

function add(element) {
  at("welcome").hidden = true;
  at("log").append(element);
  scroll(true);
}

function scroll(always) {
  const log = at("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 200) log.scrollTop = log.scrollHeight;
}

function submit(event) {
  event?.preventDefault();
  if (answering) return answering.stop();
  const text = at("prompt").value.trim();
  if (!text) return undefined;
  at("prompt").value = "";
  grow();
  return answer(text);
}

function fresh() {
  answering?.stop();
  conversation.length = 0;
  at("log").replaceChildren(at("welcome"));
  at("welcome").hidden = false;
  at("prompt").focus();
}

// ---- the page --------------------------------------------------------------------------------------------------

function grow() {
  at("prompt").style.height = "auto";
  at("prompt").style.height = `${at("prompt").scrollHeight + 2}px`;
}

/** What the service says of a model that came with it: the code model, for one, does not chat. */
async function about() {
  const reply = await fetch("/v1/models");
  const text = reply.ok ? (await reply.json()).data[0].description : "";
  at("about").textContent = text;
  at("about").hidden = !text;
}

async function readiness() {
  let state = "away";
  let text = "the service does not answer";
  try {
    const ready = await (await fetch("/ready")).json();
    state = !ready.ready ? "away" : ready.mtp.ready ? "ready" : "plain";
    const model = ready.model ?? "no model yet";
    text = {
      ready: `${model} · drafts on`,
      plain: `${model} · plain decoding: ${ready.mtp.detail || "no proposer"}`,
      away: `not ready: ${(ready.target.ready ? ready.store.detail : ready.target.detail) || "starting"}`,
    }[state];
    if (ready.ready && at("service").dataset.state !== state) await about();
  } catch {
    // the text above says it
  }
  at("service").dataset.state = state;
  at("service-text").textContent = text.split("; last error")[0]; // gRPC's own words are in the title
  at("service").title = text;
  setTimeout(readiness, READY_EVERY_MS);
}

const shownTheme = () => document.documentElement.dataset.theme ?? (DARK.matches ? "dark" : "light");

/** A choice that the system does not make by itself stays; one that it does is to follow the system again. */
function theme(name) {
  if (name === (DARK.matches ? "dark" : "light")) {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("theme");
  } else {
    document.documentElement.dataset.theme = name;
    localStorage.setItem("theme", name);
  }
}

function showBoard(shown) {
  document.body.classList.toggle("with-board", shown);
  at("show-board").setAttribute("aria-expanded", shown);
  at("show-board").textContent = shown && NARROW.matches ? "Chat" : "Board";
  board.watch(shown);
}

function toggleBoard() {
  const shown = !document.body.classList.contains("with-board");
  if (!NARROW.matches) localStorage.setItem("board", shown ? "shown" : "hidden");
  showBoard(shown);
}

function origins(shown) {
  at("colours").checked = shown;
  at("log").classList.toggle("origins", shown);
}

if (localStorage.getItem("theme")) document.documentElement.dataset.theme = localStorage.getItem("theme");
at("theme").addEventListener("click", () => theme(shownTheme() === "dark" ? "light" : "dark"));
at("fresh").addEventListener("click", fresh);
at("show-board").addEventListener("click", toggleBoard);
at("ask").addEventListener("submit", submit);
at("prompt").addEventListener("input", grow);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!answering) submit();
  }
});
at("colours").addEventListener("change", (event) => origins(event.target.checked));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.stop();
  if (!event.altKey) return;
  const action = { KeyN: fresh, KeyB: toggleBoard, KeyO: () => origins(!at("colours").checked) }[event.code];
  if (action) {
    event.preventDefault();
    action();
  }
});
const initial = () => showBoard(!NARROW.matches && localStorage.getItem("board") !== "hidden");
NARROW.addEventListener("change", initial);
origins(true);
initial();
readiness();
