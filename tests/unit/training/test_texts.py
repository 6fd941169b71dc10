"""Texts that are kept without their hidden rows: the rows of a forward pass over them are the same again."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import SHAPE, random_document, random_tensors

from seqmtp_serve.training import commands
from seqmtp_serve.training.cli import add_arguments
from seqmtp_serve.training.shards import Document, read_shard, write_shard
from seqmtp_serve.training.target import FrozenTarget, SlotCache
from seqmtp_serve.training.texts import read_texts, with_rows, write_texts


def asks_of_one_article() -> list[Document]:
    """Three texts that begin alike, and one of its own."""
    article = random_document(20, 5, seed=1).tokens
    others = [random_document(length, 3, seed=length) for length in (6, 9, 4)]
    asks = [
        replace(
            each,
            tokens=torch.cat((article, each.tokens)),
            hidden=each.hidden.new_zeros(20 + len(each.tokens), 1),
            prompt_len=22,
        )
        for each in others
    ]
    own = random_document(12, 5, seed=9)
    return [*asks, replace(own, hidden=own.hidden.new_zeros(12, 1))]


def plain_rows(target: FrozenTarget, text: Document) -> torch.Tensor:
    cache = SlotCache(target.shape, 1, len(text.tokens), torch.float32)
    return target.extend(text.tokens[:-1], cache, 0, 0)


def test_what_is_kept_is_what_was_written_each_text_once(tmp_path: Path) -> None:
    documents = asks_of_one_article()
    write_texts(tmp_path / "texts.safetensors", [*documents, documents[0]])
    found = read_texts(tmp_path / "texts.safetensors")
    expected = {(tuple(doc.tokens.tolist()), doc.prompt_len, doc.greedy) for doc in documents}
    assert [(tuple(doc.tokens.tolist()), doc.prompt_len, doc.greedy) for doc in found] == sorted(expected)


def test_tokens_of_a_large_vocabulary_are_kept_too(tmp_path: Path) -> None:
    one = replace(random_document(6, 2, seed=1), tokens=torch.tensor([1, 2, 128_000, 3, 65_536, 4]))
    write_texts(tmp_path / "texts.safetensors", [one])
    assert read_texts(tmp_path / "texts.safetensors")[0].tokens.tolist() == one.tokens.tolist()


def test_rows_are_those_of_a_pass_over_each_text_alone() -> None:
    target = FrozenTarget(SHAPE, random_tensors(SHAPE, seed=0), numerics="fp32")
    texts = sorted(asks_of_one_article(), key=lambda text: text.tokens.tolist())
    computed: list[int] = []
    extend = target.extend

    def counted(tokens_T: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(len(tokens_T))
        return extend(tokens_T, *rest)

    target.extend = counted  # type: ignore[method-assign]
    found = list(with_rows(texts, target, torch.float32))
    assert sum(computed) < sum(len(text.tokens) - 1 for text in texts) - 30, "the article was computed once"
    target.extend = extend  # type: ignore[method-assign]
    for text, document in zip(texts, found, strict=True):
        assert torch.equal(document.tokens, text.tokens)
        assert (document.prompt_len, document.greedy) == (text.prompt_len, text.greedy)
        torch.testing.assert_close(document.hidden[:-1].float(), plain_rows(target, text), rtol=0.01, atol=0.01)
        assert not document.hidden[-1].any()


def test_from_shards_to_texts_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(SHAPE, seed=0)
    checkpoint = SimpleNamespace(dense_config=SHAPE, target_tensors=lambda: tensors)
    monkeypatch.setattr(commands, "open_checkpoint", lambda *names: checkpoint)
    (tmp_path / "old").mkdir()
    documents = asks_of_one_article()
    write_shard(tmp_path / "old" / "a-0.safetensors", documents)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    file = tmp_path / "t.safetensors"
    kept = commands.keep(parser.parse_args(f"keep --shards {tmp_path / 'old'} --out {file}".split()))
    num_tokens = sum(len(doc.tokens) for doc in documents)
    assert (kept["texts"], kept["tokens"]) == (4, num_tokens)
    asked = f"recompute --texts {file} --out {tmp_path / 'new'} --shard-tokens 40"
    commands.recompute(parser.parse_args(asked.split()))
    shards = sorted((tmp_path / "new").glob("t-*.safetensors"))
    assert len(shards) > 1
    found = [doc.tokens.tolist() for path in shards for doc in read_shard(path)]
    assert sorted(found) == sorted(doc.tokens.tolist() for doc in documents)


def test_a_folder_without_shards_says_so(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(FileNotFoundError, match="no shards in"):
        commands.keep(parser.parse_args(f"keep --shards {tmp_path} --out {tmp_path / 't.safetensors'}".split()))
