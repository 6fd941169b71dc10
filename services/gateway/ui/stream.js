// One answer as a stream of chunks that outlives its connection: what was cut is resumed after the last event id.

const PATH = "/v1/chat/completions";
const GIVE_UP_MS = 30_000; // without a connection; longer than a server keeps an unread request going
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 2000;
const RETRIED = new Set([429, 500, 502, 503, 504]);

/** What the server refused with. `status` is the HTTP status, 0 for an error inside a stream. */
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

class Lost extends Error {}

/** An answer to `body`. `onLink(state)` hears "lost" and "resumed". Reading ends it; `stop()` ends the generation. */
export class Answer {
  constructor(body, { key = "", onLink = () => {} } = {}) {
    this.body = { ...body, stream: true };
    this.onLink = onLink;
    this.id = "";
    this.lastEvent = "";
    this.stopping = new AbortController();
    this.headers = { "Content-Type": "application/json", "Idempotency-Key": randomName() };
    if (key) this.headers.Authorization = `Bearer ${key}`;
  }

  /** Chunks, each once and in order, until the answer is over. Raises Refused, or AbortError after `stop()`. */
  async *chunks() {
    let lostAt = 0;
    let pause = FIRST_PAUSE_MS;
    for (;;) {
      try {
        const response = await this.open();
        for await (const event of events(response)) {
          if (lostAt) this.onLink("resumed");
          lostAt = 0;
          pause = FIRST_PAUSE_MS;
          this.lastEvent = event.id || this.lastEvent;
          if (event.data === "[DONE]") return;
          const chunk = JSON.parse(event.data);
          if (chunk.error) throw new Refused(chunk.error.message);
          this.id = chunk.id;
          yield chunk;
        }
        throw new Lost();
      } catch (error) {
        if (!(error instanceof Lost)) throw error;
        if (!lostAt) this.onLink("lost");
        lostAt ||= performance.now();
        if (performance.now() - lostAt > GIVE_UP_MS) throw new Refused("The connection was lost and did not come back.");
        await this.wait(pause);
        pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
      }
    }
  }

  /** End the generation at the server too: nobody waits for the rest. */
  stop() {
    this.stopping.abort();
    const { "Content-Type": _, "Idempotency-Key": __, ...headers } = this.headers;
    if (this.id) fetch(`${PATH}/${this.id}/cancel`, { method: "POST", headers }).catch(() => {});
  }

  /** The response to read from: of the request at first, of the rest once there is an event to go on from. */
  async open() {
    const { signal } = this.stopping;
    const { headers } = this;
    let response;
    try {
      response = this.lastEvent
        ? await fetch(`${PATH}/${this.id}`, { headers: { ...headers, "Last-Event-ID": this.lastEvent }, signal })
        : await fetch(PATH, { method: "POST", headers, body: JSON.stringify(this.body), signal });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Lost();
    }
    if (response.status === 200) return response;
    if (response.status === 204) return new Response("data: [DONE]\n\n");
    if (this.lastEvent && RETRIED.has(response.status)) throw new Lost();
    const problem = await response.json().catch(() => null);
    throw new Refused(problem?.error?.message ?? `HTTP ${response.status}`, response.status);
  }

  wait(ms) {
    const { signal } = this.stopping;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, ms);
      signal.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(new DOMException("stopped", "AbortError"));
      });
    });
  }
}

/** {id, data} of each whole server-sent event. A body that breaks off raises Lost; half an event is none. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Lost();
    }
    if (part.done) return;
    const blocks = (pending + part.value).split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const event = { id: "", data: "" };
      for (const line of block.split("\n")) {
        const [, name, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
        if (name in event) event[name] += value;
      }
      if (event.data) yield event;
    }
  }
}

function randomName() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((word) => word.toString(16).padStart(8, "0")).join("");
}
