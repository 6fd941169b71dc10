// The live board: what every coordinator counted between two looks, who is here, and what changed.

import { COST_PARTS, costs } from "./answer.js";
import { at, draw, fixed, make } from "./element.js";
import { difference, news, shortName } from "./reading.js";

const LOOK_EVERY_MS = 1000;
const WINDOW = 10; // looks that "now" is made of
const KEPT = 60; // looks that lanes and the trend show
const SHOWN_ROUNDS = 48;
const SHOWN_EVENTS = 8;

export class Board {
  constructor() {
    this.looks = []; // {at: ms, reading or null}, oldest first
    this.rounds = []; // costs of the latest answer's rounds
    this.lanes = new Map(); // worker id -> {kind, states: "here" | "weak" | "gone" | "" for each look}
    this.events = [];
    this.timer = 0;
  }

  /** Look once a second while the board is shown and the page is seen. */
  watch(shown) {
    clearTimeout(this.timer);
    if (shown) this.look();
  }

  async look() {
    let reading = null;
    if (!document.hidden) {
      reading = await fetch("/board").then((answer) => (answer.ok ? answer.json() : null)).catch(() => null);
      this.take({ at: performance.now(), reading });
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), LOOK_EVERY_MS);
  }

  take(look) {
    const before = this.looks.findLast((known) => known.reading)?.reading;
    this.looks = [...this.looks, look].slice(-KEPT);
    if (look.reading) {
      for (const event of news(before, look.reading)) this.events.unshift({ ...event, at: new Date() });
      this.events.length = Math.min(this.events.length, SHOWN_EVENTS);
    }
    this.follow(look.reading);
    this.showNow();
    this.showTrend();
    this.showWorkers(look.reading);
    this.showEvents();
  }

  // ---- numbers -------------------------------------------------------------------------------------------------

  showNow() {
    const seen = this.looks.filter((look) => look.reading).slice(-WINDOW - 1);
    const last = seen.at(-1);
    at("board-state").textContent = last && last === this.looks.at(-1) ? "all requests, last 10 s" : "the service does not answer";
    if (!last) return;
    const sum = (field) => last.reading.coordinators.reduce((total, one) => total + one[field], 0);
    at("board-running").textContent = sum("running");
    at("board-waiting").textContent = sum("waiting");
    const delta = difference(seen[0].reading, last.reading);
    const seconds = (last.at - seen[0].at) / 1000;
    at("board-tps").textContent = seconds > 0 ? fixed(delta.tokens / seconds, delta.tokens > 99 * seconds ? 0 : 1) : "–";
    at("board-er").textContent = delta.rounds ? (1 + delta.accepted / delta.rounds).toFixed(2) : "–";
    this.showPositions(last.reading);
  }

  showPositions(reading) {
    const all = difference(null, reading).positions.filter(({ drafted }) => drafted > 0);
    if (!all.length) return;
    const list = at("board-positions");
    while (list.childElementCount > all.length || list.querySelector(".empty")) list.lastChild.remove();
    all.forEach(({ drafted, accepted }, index) => {
      const row = list.children[index] ?? list.appendChild(positionRow(index));
      const rate = drafted ? (100 * accepted) / drafted : 0;
      row.querySelector("i").style.width = `${rate}%`;
      row.querySelector("b").textContent = `${Math.round(rate)} %`;
      row.title = `${accepted} of ${drafted} drafts at position ${index + 1}, since the coordinators' start`;
    });
  }

  /** Tokens a second between looks, over the last minute. */
  showTrend() {
    const rates = this.looks.map((look, index) => {
      const before = this.looks[index - 1];
      if (!look.reading || !before?.reading) return 0;
      return difference(before.reading, look.reading).tokens / ((look.at - before.at) / 1000);
    });
    const highest = Math.max(10, ...rates);
    const step = 320 / (KEPT - 1);
    const points = rates.map((rate, index) => {
      const x = 320 - (rates.length - 1 - index) * step;
      return `${x.toFixed(1)},${(54 - (50 * rate) / highest).toFixed(1)}`;
    });
    const start = points[0]?.split(",")[0] ?? 320;
    at("board-trend").replaceChildren(
      draw("polygon", { class: "area", points: `${start},55 ${points.join(" ")} 320,55` }),
      draw("line", { class: "base", x1: 0, x2: 320, y1: 55, y2: 55 }),
      draw("polyline", { class: "line", points: points.join(" ") }),
    );
    const peak = Math.round(Math.max(0, ...rates));
    at("board-trend").setAttribute("aria-label", `Tokens a second, last minute: now ${Math.round(rates.at(-1) ?? 0)}, at most ${peak}`);
  }

  // ---- the latest answer, round by round -----------------------------------------------------------------------

  begin() {
    this.rounds = [];
  }

  row(row) {
    const cost = row.version > 1 ? costs(row.timings_ms) : null;
    if (!cost) return;
    this.rounds = [...this.rounds, { ...cost, round: row.version - 1, total: row.timings_ms.step }].slice(-SHOWN_ROUNDS);
    const longest = Math.max(...this.rounds.map((one) => one.total));
    const bars = this.rounds.map((one) => {
      const title = `round ${one.round}: ${COST_PARTS.map((part) => `${part.replace("_", " ")} ${one[part].toFixed(1)}`).join(", ")} ms`;
      const parts = COST_PARTS.map((part) => {
        const piece = make("i", { class: part });
        piece.style.height = `${(100 * one[part]) / longest}%`;
        return piece;
      });
      return make("span", { class: "bar", title }, ...parts);
    });
    at("board-ledger").replaceChildren(...bars);
    const mean = this.rounds.reduce((total, one) => total + one.total, 0) / this.rounds.length;
    at("ledger-note").textContent = `latest answer, mean ${fixed(mean, 1)} ms`;
    at("board-ledger").setAttribute("aria-label", `Cost of the last ${this.rounds.length} rounds: mean ${fixed(mean, 1)} milliseconds`);
  }

  // ---- workers -------------------------------------------------------------------------------------------------

  /** One more state for each worker that was here within the minute. */
  follow(reading) {
    const here = new Map((reading?.workers ?? []).map((worker) => [worker.id, worker]));
    for (const [id, worker] of here) if (!this.lanes.has(id)) this.lanes.set(id, { kind: worker.kind, states: [] });
    for (const [id, lane] of this.lanes) {
      const state = !reading ? "" : here.has(id) ? "here" : "gone";
      lane.states = [...lane.states, state].slice(-KEPT);
      if (lane.states.length === KEPT && !lane.states.includes("here")) this.lanes.delete(id);
    }
  }

  showWorkers(reading) {
    if (!this.lanes.size) return;
    const order = { target: 0, proposer: 1, coordinator: 2 };
    const lanes = [...this.lanes].sort(([a, one], [b, other]) => order[one.kind] - order[other.kind] || (a < b ? -1 : 1));
    at("board-workers").replaceChildren(...lanes.map(([id, lane]) => workerRow(id, lane, reading)));
  }

  showEvents() {
    if (!this.events.length) return;
    const list = at("board-events");
    const known = new Set([...list.children].map((row) => row.dataset.key));
    list.querySelector(".empty")?.remove();
    for (const event of [...this.events].reverse()) {
      const key = `${event.at.getTime()} ${event.text}`;
      if (known.has(key)) continue;
      const time = make("time", { text: event.at.toTimeString().slice(0, 8) });
      list.prepend(make("li", { "data-key": key }, time, make("span", { class: event.tone, text: event.text })));
    }
    while (list.childElementCount > SHOWN_EVENTS) list.lastChild.remove();
  }
}

function positionRow(index) {
  return make("li", {}, make("span", { text: index + 1 }), make("span", { class: "track" }, make("i")), make("b"));
}

const ROLES = { target: "target group", proposer: "proposer", coordinator: "coordinator" };

function workerRow(id, lane, reading) {
  const state = lane.states.at(-1);
  const detail = reading?.coordinators.find((one) => one.id === id);
  const idle = detail && !(detail.target.ready && detail.store.ready);
  const shown = state === "gone" ? "gone" : idle ? "waits" : state === "here" ? "here" : "unknown";
  const name = make("div", { class: "who" },
    make("b", { text: ROLES[lane.kind] ?? lane.kind }), make("span", { text: shortName(id), title: id }), make("em", { text: shown }),
  );
  const step = 320 / KEPT;
  const svg = draw("svg", { class: "lane", viewBox: "0 0 320 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  const first = KEPT - lane.states.length;
  lane.states.forEach((one, index) => {
    if (one) svg.append(draw("rect", { class: one, x: (first + index) * step, y: 0, width: step + 0.4, height: 8 }));
  });
  return make("li", { class: state === "gone" ? "away" : idle ? "weak" : "" }, name, svg);
}
