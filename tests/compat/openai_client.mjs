// OpenAI's client for Node against a running gateway: answers, streams, the stream helper, typed errors. `make compat`.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.SEQMTP_URL}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model: "fake", messages: [{ role: "user", content: "hi" }] };

const whole = await client.chat.completions.create(ask);
assert.equal(whole.choices[0].message.content, "hello world");
assert.equal(whole.usage.completion_tokens, 7);

let text = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, "hello world");
assert.equal(usage.completion_tokens, 7);

const helper = client.chat.completions.stream(ask);
assert.equal(await helper.finalContent(), "hello world");

let completion = "";
for await (const chunk of await client.completions.create({ model: "fake", prompt: "a", stream: true })) {
  completion += chunk.choices[0]?.text ?? "";
}
assert.equal(completion, "hello world");

assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["fake"]);
await assert.rejects(client.chat.completions.create({ ...ask, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(
  client.chat.completions.create({ ...ask, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
