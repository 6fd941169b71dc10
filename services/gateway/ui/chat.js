// The chat page: one conversation, streamed a committed round at a time, each token coloured by its origin.

const at = (id) => document.getElementById(id);
const NAMES = { a: "accepted draft", c: "correction", n: "bonus or plain token", b: "first token" };
const READY_EVERY_MS = 4000;
const SHOWN_ROUNDS = 60;

const conversation = []; // what the model is told: {role, content}
let answering = null; // AbortController of the answer being streamed

// ---- server-sent events ----------------------------------------------------------------------------------------

/** The JSON of each event of a response body, until [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (pending + value).split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((text) => text.startsWith("data: "));
      if (!line) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(messages, signal) {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
  const body = {
    messages,
    stream: true,
    temperature: number("temperature"),
    seed: number("seed"),
    max_tokens: number("budget"),
    speculation: { trace: true, max_depth: number("depth") },
  };
  const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (response.ok) return response.body;
  const problem = await response.json().catch(() => null);
  if (response.status === 401) {
    at("key-label").hidden = false;
    at("key").focus();
  }
  throw new Error(problem?.error?.message ?? `HTTP ${response.status}`);
}

// ---- numbers of one answer -------------------------------------------------------------------------------------

class Meters {
  constructor() {
    this.started = performance.now();
    this.tokens = this.rounds = this.accepted = this.drafted = 0;
    this.firstMs = null;
    at("rounds").replaceChildren();
  }

  add(row) {
    const now = performance.now();
    this.firstMs ??= now - this.started;
    this.tokens += row.tokens.length;
    if (row.drafted > 0) {
      this.rounds += 1;
      this.accepted += row.accepted;
      this.drafted += row.drafted;
    }
    if (row.version > 1) this.bar(row);
    const seconds = (now - this.started - this.firstMs) / 1000;
    at("er").textContent = this.rounds ? (1 + this.accepted / this.rounds).toFixed(2) : "1.00";
    at("rate").textContent = this.drafted ? `${Math.round((100 * this.accepted) / this.drafted)} %` : "–";
    at("speed").textContent = seconds > 0 ? ((this.tokens - 1) / seconds).toFixed(1) : "–";
    at("ttft").textContent = `${Math.round(this.firstMs)} ms`;
    at("count").textContent = this.tokens;
  }

  bar(row) {
    const bar = document.createElement("i");
    bar.style.height = `${Math.min(100, 25 * row.tokens.length)}%`;
    bar.className = row.drafted === 0 ? "" : row.accepted === row.drafted ? "whole" : "cut";
    bar.title = `round ${row.version - 1}: ${row.accepted} of ${row.drafted} drafts accepted`;
    at("rounds").append(bar);
    if (at("rounds").childElementCount > SHOWN_ROUNDS) at("rounds").firstChild.remove();
  }
}

// ---- the conversation ------------------------------------------------------------------------------------------

function message(kind, text = "") {
  at("welcome").hidden = true;
  const element = document.createElement("div");
  element.className = `message ${kind}`;
  element.textContent = text;
  at("log").append(element);
  scroll(true);
  return element;
}

function note(element, text) {
  const line = document.createElement("span");
  line.className = "note";
  line.textContent = text;
  element.append(line);
}

function scroll(always) {
  const log = at("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function show(element, row) {
  row.pieces.forEach((piece, index) => {
    if (!piece) return;
    const token = document.createElement("span");
    const origin = row.origins[index] ?? "n";
    token.className = `token ${origin}`;
    token.textContent = piece;
    token.title = `${NAMES[origin]}, round ${row.version - 1}`;
    element.append(token);
  });
  scroll(false);
}

async function answer(text) {
  conversation.push({ role: "user", content: text });
  message("user", text);
  const element = message("assistant busy");
  answering = new AbortController();
  at("send").textContent = "Stop";
  const meters = new Meters();
  let said = "";
  try {
    for await (const chunk of events(await ask(conversation, answering.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      said += chunk.choices[0]?.delta?.content ?? "";
      if (chunk.seqmtp) {
        meters.add(chunk.seqmtp);
        show(element, chunk.seqmtp);
      }
      if (chunk.choices[0]?.finish_reason === "length") note(element, "stopped at the token limit");
    }
  } catch (error) {
    if (error.name === "AbortError") note(element, "stopped");
    else message("error", error.message);
  }
  element.classList.remove("busy");
  if (said) conversation.push({ role: "assistant", content: said });
  else {
    conversation.pop(); // an answer without text leaves no trace: the question may be asked again
    at("prompt").value ||= text;
  }
  answering = null;
  at("send").textContent = "Send";
  scroll(false);
}

function submit(event) {
  event?.preventDefault();
  if (answering) return answering.abort();
  const text = at("prompt").value.trim();
  if (!text) return undefined;
  at("prompt").value = "";
  grow();
  return answer(text);
}

function fresh() {
  answering?.abort();
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
  } catch {
    // the text above says it
  }
  at("service").dataset.state = state;
  at("service-text").textContent = text;
  setTimeout(readiness, READY_EVERY_MS);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
}

theme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
at("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
at("fresh").addEventListener("click", fresh);
at("ask").addEventListener("submit", submit);
at("prompt").addEventListener("input", grow);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!answering) submit();
  }
});
at("colours").addEventListener("change", (event) => at("log").classList.toggle("origins", event.target.checked));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.abort();
  if (event.altKey && event.code === "KeyN") fresh();
});
at("log").classList.add("origins");
readiness();
