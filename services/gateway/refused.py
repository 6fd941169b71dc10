"""Fields that would change the answer and are not supported: refused by name, unless they say what happens anyway.

A field that nobody knows is ignored, with one logged warning a request: OpenAI's clients expect that of a server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from seqmtp_serve.errors import InvalidField

LOGGER = logging.getLogger("seqmtp.gateway")

# field -> values that ask for nothing. None always does.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    # the distribution
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "min_new_tokens": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "watermark": (False,),
    "custom_logit_processor": (),
    "vllm_xargs": ({},),
    "lora_path": (),
    "reasoning": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # constrained output and tools
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "regex": (),  # these of SGLang and llama.cpp: here they have the names of vLLM
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "stop_regex": (),
    "tools": ([],),  # of the other route: chat has them
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prediction": (),  # of completions
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    # the prompt
    "chat_template": (),
    "chat_template_kwargs": ({},),  # of completions
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "add_special_tokens": (False,),  # of chat: its template writes them
    "mm_processor_kwargs": ({},),
    # what comes back
    "top_logprobs": (0,),  # of completions
    "prompt_logprobs": (),  # of chat
    "echo": (False,),  # of chat
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "stream_interval": (1,),
}
# Without special tokens in the text, and without tools, these say nothing.
IDLE = frozenset({"spaces_between_special_tokens", "parallel_tool_calls", "prompt_cache_retention"})


def judge_extras(extras: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]] = REFUSED) -> None:
    """Raise InvalidField for the first refused field that asks for something; log the names nobody knows."""
    for name, value in extras.items():
        if name in refused and not _is_neutral(value, refused[name]):
            raise InvalidField(f"'{name}' is not supported by this server: leave it out.", param=name)
    if unknown := [name for name in extras if name not in refused and name not in IDLE]:
        shown = ", ".join(repr(name[:64]) for name in unknown[:8])
        LOGGER.warning("%d unknown request field(s) ignored: %s", len(unknown), shown)


def _is_neutral(value: Any, neutrals: tuple[Any, ...]) -> bool:
    """Equality that tells False from 0 and True from 1, as JSON does."""
    return value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutrals
    )
