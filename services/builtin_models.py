"""What the service knows of the models that ship, beyond their files: what they are, and how they are served.

`settings` lie below everything a person says (`services/settings_sources.py`), so a flag still wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seqmtp_serve.checkpoint.locate import CODE_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """`about` is two sentences for people, or nothing. `request` is the rest of a first request's JSON, after the
    model's name, for `route`.
    """

    about: str = ""
    route: str = "/v1/chat/completions"
    request: str = """"stream": true, "max_tokens": 120,
    "messages": [{"role": "user", "content": "Name three uses of a paper clip."}]"""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def curl(self, url: str, name: str) -> str:
        """That request as a shell command. `name` is what the model is served under."""
        head = f"curl -N {url}{self.route} -H 'Content-Type: application/json' -d"
        return f"""{head} '{{
    "model": "{name}", {self.request}}}'"""


_MODELS = {
    CODE_MODEL: BuiltinModel(
        about=(
            "A model of the DeepSeek-V3 layout with 9.9 million parameters, trained here on the source of Python's "
            "standard library: it continues Python code, it does not chat. By default its 16 experts are spread over a "
            "target group of 2 ranks, and a proposer holds its MTP module alone."
        ),
        route="/v1/completions",
        request=""""stream": true, "max_tokens": 120, "temperature": 0,
    "prompt": "import os\\n\\n\\ndef read_lines(path):\\n\"""",
        # fp32: at this width int8 products save no time. The context is what the model declares.
        settings={"engine": {"target_ranks": 2, "weights": "fp32", "max_model_len": 1024}},
    ),
}


def builtin_model(name: str) -> BuiltinModel:
    """What is known of the model `name`; for any other than these, what holds for all."""
    return _MODELS.get(name, BuiltinModel())
