// The ledger of an answer, as the service keeps it: each round's depth and the reason for it, as a table.

import { fixed, make } from "./element.js";

const HEADS = [
  ["round"], ["asked", "Drafts that the MTP module was asked for"], ["drafted", "Drafts that were verified"],
  ["accepted", "Drafts that stood"], ["tokens", "Tokens that came"], ["ms", "The round's step as a whole"], ["why this depth"],
];
const WORDS = { static: "as many as allowed" };

/** Show the ledger below the answer, or take it away again. `id` is the answer's, `key` the API key or "". */
export async function toggleLedger(element, button, id, key) {
  const shown = element.querySelector(".ledger-table");
  button.setAttribute("aria-expanded", !shown);
  if (shown) return shown.remove();
  const table = make("table");
  const head = make("p", { role: "status", text: "Asking for the ledger…" });
  const frame = make("section", { class: "ledger-table", "aria-label": "Ledger of this answer", tabindex: "0" }, head, table);
  element.append(frame);
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const reply = await fetch(`/v1/requests/${encodeURIComponent(id)}/ledger`, { headers });
    const ledger = await reply.json();
    if (!reply.ok) throw new Error(ledger.error.message);
    const rounds = ledger.choices[0].rounds.filter((round) => round.version > 1);
    head.textContent = `${rounds.length} rounds; depth and reason of the last ${ledger.kept_rounds} are kept`;
    table.append(heads(), ...rounds.map((round) => row(cells(round))));
  } catch (error) {
    head.textContent = `The ledger cannot be shown: ${error.message}`;
  }
  return frame.scrollIntoView({ block: "nearest" });
}

function cells(round) {
  const from = round.drafts_from === "prediction" ? " (prediction)" : "";
  const spent = fixed(round.timings_ms?.step, 1);
  return [round.version - 1, round.depth ?? "–", `${round.drafted}${from}`, round.accepted, round.committed, spent, WORDS[round.reason] ?? round.reason ?? "not kept"];
}

const heads = () => make("tr", {}, ...HEADS.map(([text, title]) => make("th", { text, title, scope: "col" })));
const row = (texts) => make("tr", {}, ...texts.map((text) => make("td", { text })));
