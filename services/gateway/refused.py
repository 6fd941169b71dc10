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
    "max_new_tokens": (),
    "n_predict": (-1,),
    "max_output_tokens": (),  # of responses
    "stop_sequences": ([],),
    "no_stop_trim": (False,),
    "repeat_penalty": (1,),
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
    "thinking": (),
    "enable_thinking": (),
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
    "messages": (),  # of chat
    "prompt": (),  # of completions
    "input": (),  # these of responses
    "instructions": (),
    "previous_response_id": (),
    "conversation": (),
    "context_management": ([],),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "text": ({}, {"format": {"type": "text"}}),
    "include": ([],),
    "system": (),
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
    # whom it is shared with
    "cache_salt": (),
}
# Without special tokens in the text, and without tools, these say nothing.
IDLE = frozenset({"spaces_between_special_tokens", "parallel_tool_calls", "prompt_cache_retention"})

# What to do about a refused field; leaving it out, where this says nothing.
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "max_output_tokens"), "the budget is 'max_tokens'"),
    **dict.fromkeys(("thinking", "enable_thinking", "reasoning_effort"), "chat has 'chat_template_kwargs'"),
    **dict.fromkeys(("tools", "tool_choice", "prediction", "chat_template_kwargs", "messages"), "chat has it"),
    **dict.fromkeys(("echo", "prompt_logprobs", "prompt"), "completions have it"),
    **dict.fromkeys(("input", "instructions", "truncation", "include"), "responses have it"),
    "text": "responses have it, chat has 'response_format'",
    "top_logprobs": "chat has it, completions say it with 'logprobs'",
    "logprobs": "responses say it with 'include' and 'top_logprobs'",
    "functions": "use 'tools'",
    "function_call": "use 'tool_choice'",
    "min_new_tokens": "use 'min_tokens'",
    "stop_sequences": "use 'stop'",
    "no_stop_trim": "use 'include_stop_str_in_output'",
    "repeat_penalty": "use 'repetition_penalty'",
    "regex": "use 'structured_outputs'",
    "ebnf": "use 'structured_outputs'",
    "grammar": "use 'structured_outputs'",
    "json_schema": "use 'response_format'",
    "guided_whitespace_pattern": "use 'structured_outputs'",
    "system": "use a message",
}


def judge_extras(extras: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]] = REFUSED) -> None:
    """Raise InvalidField for the first refused field that asks for something; log the names nobody knows."""
    for name, value in extras.items():
        if name in refused and not _is_neutral(value, refused[name]):
            raise InvalidField(f"'{name}' is not supported here: {INSTEAD.get(name, 'leave it out')}.", param=name)
    if unknown := [name for name in extras if name not in refused and name not in IDLE]:
        shown = ", ".join(repr(name[:64]) for name in unknown[:8])
        LOGGER.warning("%d unknown request field(s) ignored: %s", len(unknown), shown)


def _is_neutral(value: Any, neutrals: tuple[Any, ...]) -> bool:
    """Equality that tells False from 0 and True from 1, as JSON does."""
    return value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutrals
    )
