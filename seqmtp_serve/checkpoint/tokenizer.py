"""Text in and out of a checkpoint: its tokenizer, its chat template, and the ids that begin and end a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from seqmtp_serve.errors import TargetIncomplete

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp token types that BPE merges never make
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextContract:
    """What a text is to this model. `add_bos`: whether plain prompts begin with `bos_token_id`."""

    chat_template: str
    bos_token_id: int | None
    add_bos: bool
    eos_token_ids: tuple[int, ...]


# ---- GGUF metadata ---------------------------------------------------------------------------------------------


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE from GGUF metadata. Raises TargetIncomplete for another kind, or a split rule not in the table."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise TargetIncomplete(f"tokenizer.ggml.model: {kind!r} is not supported, gpt2 (byte-level BPE) is")
    if split not in _SPLITS:
        raise TargetIncomplete(f"tokenizer.ggml.pre: {split!r} is not one of {sorted(_SPLITS)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (line.split(" ") for line in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in kinds if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in kinds if k == _USER_DEFINED])
    return tokenizer


def gguf_text_contract(metadata: Mapping[str, Any]) -> TextContract:
    """Ends are what the file declares (eos and end-of-turn), no guess from token names."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return TextContract(
        chat_template=metadata.get("tokenizer.chat_template", ""),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", False),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def _digits_then_words() -> Any:
    """Each digit alone, then GPT-2's words (SmolLM: Hugging Face's own `tokenizer.json`, llama.cpp `SMOLLM`)."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _llama3_words() -> Any:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITS: dict[str, Callable[[], Any]] = {
    "smollm": _digits_then_words,
    "gpt-2": _words,
    "default": _words,
    "llama-bpe": _llama3_words,
}

# ---- Hugging Face folder ---------------------------------------------------------------------------------------


def hf_tokenizer(folder: Path) -> Tokenizer:
    """`tokenizer.json`. Raises TargetIncomplete when it is missing or broken."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as fault:  # tokenizers raises a bare Exception
        raise TargetIncomplete(f"tokenizer.json: cannot be read ({fault})") from fault


def hf_text_contract(folder: Path) -> TextContract:
    """From `generation_config.json`, `config.json`, `tokenizer_config.json`, `chat_template.jinja`, where present."""
    config = _json(folder / "config.json")
    generation = config | _json(folder / "generation_config.json")
    tokenizer_config = _json(folder / "tokenizer_config.json")
    template = tokenizer_config.get("chat_template") or ""
    jinja = folder / "chat_template.jinja"
    ends = generation.get("eos_token_id")
    return TextContract(
        chat_template=jinja.read_text(encoding="utf-8") if jinja.exists() else _default_template(template),
        bos_token_id=generation.get("bos_token_id"),
        add_bos=bool(tokenizer_config.get("add_bos_token", False)),
        eos_token_ids=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
    )


def _default_template(template: str | list[dict[str, str]]) -> str:
    """Some files list several templates by name."""
    if isinstance(template, str):
        return template
    return next((entry["template"] for entry in template if entry["name"] == "default"), "")


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise TargetIncomplete(f"{path.name}: not JSON ({fault})") from fault
    return found
