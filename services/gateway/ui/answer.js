// One answer as it grows: its tokens by origin, a column for each round, its numbers, and the race without drafts.

import { facts, fixed, make, percent } from "./element.js";
import { toggleLedger } from "./ledger.js";
import { Answer } from "./stream.js";

const NAMES = { a: "accepted draft", l: "accepted draft, copied from this text", p: "predicted", f: "forced by the grammar", c: "correction", n: "bonus or plain token", b: "first token" };
const PARTS = ["forward", "draft_wait", "pack", "sync"];

/** What one answer counted, from the trace of its rows and the clock of this page. */
export class Numbers {
  constructor() {
    this.started = performance.now();
    this.firstAt = this.lastAt = 0;
    this.tokens = this.rounds = this.drafted = this.accepted = 0;
    this.text = "";
  }

  add(row) {
    this.lastAt = performance.now();
    this.firstAt ||= this.lastAt;
    this.tokens += row.tokens.length;
    if (row.drafted > 0) {
      this.rounds += 1;
      this.drafted += row.drafted;
      this.accepted += row.accepted;
    }
  }

  /** Seconds from the first row to the last: what speculation can change. */
  get seconds() {
    return (this.lastAt - this.firstAt) / 1000;
  }

  get expectedProgress() {
    return this.rounds ? 1 + this.accepted / this.rounds : 1;
  }

  list(seed) {
    return [
      ["E[R]", this.expectedProgress.toFixed(2), "Mean tokens a verification round yields: 1 + accepted drafts / rounds"],
      ["accepted", percent(this.accepted, this.drafted), "Accepted drafts / drafts"],
      ["tokens/s", this.seconds > 0 ? ((this.tokens - 1) / this.seconds).toFixed(1) : "–", "After the first row"],
      ["first token", `${Math.round(this.firstAt - this.started)} ms`],
      ["tokens", this.tokens],
      ["seed", seed],
    ];
  }
}

/** Milliseconds of one round, disjoint, by part; null when the row was read from the record and has none. */
export function costs(timings) {
  if (!timings?.step) return null;
  const pack = (timings.pack ?? 0) + (timings.select ?? 0);
  const known = { forward: timings.forward ?? 0, draft_wait: timings.draft_wait ?? 0, pack };
  const explained = known.forward + known.draft_wait + known.pack;
  return { ...known, sync: Math.max(0, timings.step - explained) };
}

export const COST_PARTS = PARTS;

/** The element of one answer. `asked` is the request's body, its seed included; `onRow` hears of every row. */
export class AnswerView {
  constructor(asked, onRow) {
    this.asked = asked;
    this.onRow = onRow;
    this.numbers = new Numbers();
    this.text = make("div", { class: "text" });
    this.rounds = make("div", { class: "rounds", role: "img", "aria-label": "No rounds yet" });
    this.foot = make("div");
    this.notes = make("p", { class: "notes" });
    this.element = make("article", { class: "message assistant busy" }, this.text, this.rounds, this.foot, this.notes);
    this.element.addEventListener("pointerover", (event) => this.light(event.target.dataset?.round));
    this.element.addEventListener("pointerleave", () => this.light());
  }

  /** One chunk of the stream. */
  take(chunk) {
    const [choice] = chunk.choices;
    this.id = chunk.id;
    this.numbers.text += choice?.delta?.content ?? "";
    if (chunk.seqmtp) this.row(chunk.seqmtp);
    if (choice?.finish_reason === "length") this.note("stopped at the token limit");
  }

  row(row) {
    this.numbers.add(row);
    const round = row.version - 1;
    row.pieces.forEach((piece, index) => {
      const origin = row.origins[index] ?? "n";
      const title = `${NAMES[origin] ?? origin}, ${round ? `round ${round}` : "prefill"}`;
      if (piece) this.text.append(make("span", { class: `token ${origin}`, "data-round": round, title, text: piece }));
    });
    if (round) this.rounds.append(column(round, row));
    this.foot.replaceChildren(facts("facts", this.numbers.list(this.asked.seed)));
    this.onRow(row);
  }

  note(text) {
    this.notes.textContent = this.notes.textContent ? `${this.notes.textContent} · ${text}` : text;
  }

  /** The answer is over: its numbers in words, and what can be done with it. */
  close() {
    const { numbers } = this;
    this.element.classList.remove("busy");
    const summary =
      `${this.rounds.childElementCount} rounds, ${numbers.expectedProgress.toFixed(2)} tokens a round, ` +
      `${numbers.accepted} of ${numbers.drafted} drafts accepted`;
    this.rounds.setAttribute("aria-label", summary);
    if (!numbers.tokens) return "";
    const race = make("button", { type: "button", class: "race-button", text: "Same request without speculation" });
    race.addEventListener("click", () => compare(this, race));
    const ledger = make("button", { type: "button", class: "ledger-button", "aria-expanded": "false", text: "Ledger" });
    ledger.addEventListener("click", () => toggleLedger(this.element, ledger, this.id, this.asked.key));
    this.notes.after(make("div", { class: "actions" }, race, ledger));
    return summary;
  }

  light(round) {
    for (const lit of this.element.querySelectorAll(".lit")) lit.classList.remove("lit");
    if (round === undefined || round === "0") return;
    for (const part of this.element.querySelectorAll(`[data-round="${round}"]`)) part.classList.add("lit");
  }
}

/** A round from the bottom up: tokens that came, then drafts that were not used. */
function column(round, row) {
  const unused = Math.max(0, row.drafted - row.tokens.length);
  const cells = [...row.origins, ...Array(unused).fill("unused")];
  const cost = costs(row.timings_ms);
  const title =
    `round ${round}: ${row.accepted} of ${row.drafted} drafts accepted, ${row.tokens.length} tokens` +
    (cost ? `, ${fixed(row.timings_ms.step, 1)} ms` : "");
  return make("span", { class: "round", title, "data-round": round }, ...cells.map((kind) => make("i", { class: kind, "data-round": round })));
}

// ---- with and without drafts -----------------------------------------------------------------------------------

/** Run the request twice, one after the other, and say what speculation changed: never the text, perhaps the time. */
async function compare(view, button) {
  view.element.querySelector(".comparison")?.remove();
  const bars = { with: make("i", { class: "with" }), without: make("i", { class: "without" }) };
  const times = { with: make("dd", { text: "…" }), without: make("dd", { text: "…" }) };
  const verdict = make("p", { class: "verdict", role: "status", text: "Running both, one after the other…" });
  const small = make("p", { class: "small", text: "Measured now, from the first token to the last, with the same seed." });
  const race = make("dl", { class: "race" });
  for (const name of ["with", "without"]) {
    race.append(make("dt", { text: `${name} drafts` }), make("dd", { class: "track" }, bars[name]), times[name]);
  }
  view.element.append(make("section", { class: "comparison", "aria-label": "With and without speculation" }, verdict, race, small));
  button.disabled = true;
  view.element.scrollIntoView({ block: "end" });
  try {
    const asked = view.asked.body;
    const depth = asked.speculation.max_depth || undefined; // an answer at depth 0 races against what the server does
    const total = view.numbers.tokens;
    const run = (name, speculation) =>
      measure({ ...asked, speculation: { ...speculation, trace: true } }, view.asked.key, (numbers) => {
        bars[name].style.width = `${Math.min(100, (100 * numbers.tokens) / total)}%`;
        times[name].textContent = `${numbers.seconds.toFixed(2)} s`;
      });
    const drafted = await run("with", { max_depth: depth });
    const plain = await run("without", { enabled: false });
    const longest = Math.max(drafted.seconds, plain.seconds) || 1;
    bars.with.style.width = `${(100 * drafted.seconds) / longest}%`;
    bars.without.style.width = `${(100 * plain.seconds) / longest}%`;
    const said = judge(drafted, plain);
    verdict.textContent = said.text;
    verdict.classList.toggle("differs", !said.equal);
  } catch (error) {
    verdict.textContent = `The comparison did not come to its end: ${error.message}`;
  }
  button.disabled = false;
  button.textContent = "Run both again";
}

async function measure(body, key, onProgress) {
  const numbers = new Numbers();
  for await (const chunk of new Answer(body, { key }).chunks()) {
    numbers.text += chunk.choices[0]?.delta?.content ?? "";
    if (!chunk.seqmtp) continue;
    numbers.add(chunk.seqmtp);
    onProgress(numbers);
  }
  return numbers;
}

/** In words: are the texts equal, and which was faster. Pure. */
export function judge(drafted, plain) {
  const equal = drafted.text === plain.text;
  const saved = plain.seconds - drafted.seconds;
  const times = drafted.seconds > 0 ? ` (${(plain.seconds / drafted.seconds).toFixed(2)} times as fast)` : "";
  const pace =
    Math.abs(saved) < 0.01
      ? "No time saved or lost."
      : saved > 0
        ? `${saved.toFixed(2)} s saved${times}.`
        : `${(-saved).toFixed(2)} s lost: drafts did not pay here${times}.`;
  if (equal) return { equal, text: `Equal text, ${drafted.tokens} tokens. ${pace}` };
  let same = 0;
  while (drafted.text[same] === plain.text[same]) same += 1;
  return { equal, text: `The texts differ from character ${same + 1} on: this server's passes are not batch-invariant. ${pace}` };
}
