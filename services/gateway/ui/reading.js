// Two readings of /board: what was counted between them, and what changed. Pure.

// What the loss of a worker means: while another of its kind is here, and when none is.
const LEFT = {
  target: ["its requests are replayed on another", "requests wait for another"],
  proposer: ["another one drafts", "rounds go on without drafts"],
  coordinator: ["another takes its requests over", "requests wait for another"],
};
const ROLES = { target: "target group", proposer: "proposer", coordinator: "coordinator" };

export const shortName = (id) => id.replace(/^[a-z]+-/, "").slice(0, 6);

/** Totals of `after` less those of `before` (null: since the start), each coordinator by itself: one may be new. */
export function difference(before, after) {
  const known = new Map((before?.coordinators ?? []).map((one) => [one.id, one.totals]));
  const total = { tokens: 0, rounds: 0, drafted: 0, accepted: 0, positions: [] };
  for (const { id, totals } of after.coordinators) {
    const old = known.get(id);
    for (const name of ["tokens", "rounds", "drafted", "accepted"]) total[name] += totals[name] - (old?.[name] ?? 0);
    totals.positions.forEach((position, index) => {
      const sum = (total.positions[index] ??= { drafted: 0, accepted: 0 });
      sum.drafted += position.drafted - (old?.positions[index]?.drafted ?? 0);
      sum.accepted += position.accepted - (old?.positions[index]?.accepted ?? 0);
    });
  }
  return total;
}

/** What a person should hear of, as {text, tone}. */
export function news(before, after) {
  if (!before) return [];
  const found = [];
  const names = (reading) => new Map(reading.workers.map((worker) => [worker.id, worker.kind]));
  const old = names(before);
  const now = names(after);
  for (const [id, kind] of old) {
    if (now.has(id)) continue;
    const consequence = LEFT[kind]?.[[...now.values()].includes(kind) ? 0 : 1] ?? "";
    found.push({ tone: "bad", text: `${ROLES[kind] ?? kind} ${shortName(id)} left: ${consequence}` });
  }
  for (const [id, kind] of now) {
    if (!old.has(id)) found.push({ tone: "good", text: `${ROLES[kind] ?? kind} ${shortName(id)} is here` });
  }
  const ready = (reading, side) => reading.coordinators.some((one) => one[side].ready);
  // Without a target nothing is decoded, so drafts are not what is missing.
  const any = (reading, side) => ready(reading, side) || (side === "mtp" && !ready(reading, "target"));
  for (const [side, away, back] of [
    ["mtp", "no drafts: plain decoding goes on", "drafts are back"],
    ["target", "no target group: requests wait", "target passes are back"],
    ["store", "the store does not answer: nothing is shown that is not committed", "the store is back"],
  ]) {
    if (any(before, side) !== any(after, side)) found.push(any(after, side) ? { tone: "good", text: back } : { tone: "bad", text: away });
  }
  const replays = (reading) => reading.coordinators.reduce((total, one) => total + one.totals.replays, 0);
  const replayed = replays(after) - replays(before);
  if (replayed > 0) found.push({ tone: "good", text: `${replayed} ${replayed === 1 ? "request is" : "requests are"} replayed from committed rows` });
  return found;
}
