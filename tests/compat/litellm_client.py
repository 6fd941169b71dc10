"""litellm against a running gateway: answers, streams, usage, and how it sorts our errors. Run by `make compat`."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a file at import

import litellm

URL = os.environ["SEQMTP_URL"] + "/v1"
ASK = {"model": "openai/fake", "api_base": URL, "api_key": "none", "num_retries": 0}
HI = [{"role": "user", "content": "hi"}]

whole = litellm.completion(messages=HI, **ASK)
assert whole.choices[0].message.content == "hello world", whole
assert whole.usage.completion_tokens == 7, whole.usage

text, usage = "", None
for chunk in litellm.completion(messages=HI, stream=True, stream_options={"include_usage": True}, **ASK):
    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    usage = getattr(chunk, "usage", None) or usage
assert text == "hello world", text
assert usage is not None
assert usage.completion_tokens == 7, usage

hosted = litellm.completion(messages=HI, **{**ASK, "model": "hosted_vllm/fake"})
assert hosted.choices[0].message.content == "hello world", hosted

try:
    litellm.completion(messages=[{"role": "user", "content": "x" * 5000}], **ASK)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt that is too long was not sorted as such")
try:
    litellm.completion(messages=HI, **{**ASK, "model": "openai/other"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was not sorted as such")
