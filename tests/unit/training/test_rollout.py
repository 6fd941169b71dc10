"""The batched sampler writes what a plain, cacheless forward would; a reply ends where it should."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from tiny_llama import SHAPE, random_tensors

from seqmtp_serve.training.rollout import Ask, Sampler, Task, draw, is_looping
from seqmtp_serve.training.shards import Document
from seqmtp_serve.training.target import FrozenTarget, SlotCache

TENSORS = random_tensors(SHAPE, seed=0)
PREFIX, OPENS, EOS = [5, 9], [0, 3], 0


def plain_hidden(tokens: list[int]) -> torch.Tensor:
    """Pre-norm rows ``[T, d]`` from scratch, in fp64, every head by itself."""
    shape, w = SHAPE, {name: value.double() for name, value in TENSORS.items()}
    size, count = shape.head_dim, len(tokens)

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + shape.rms_eps).sqrt() * gain

    def turn(x: torch.Tensor) -> torch.Tensor:
        rows = []
        for position in range(count):
            angles = [position / shape.rope_theta ** (2 * i / size) for i in range(size // 2)]
            cos = torch.tensor([math.cos(a) for a in angles]).double()
            sin = torch.tensor([math.sin(a) for a in angles]).double()
            low, high = x[position, : size // 2], x[position, size // 2 :]
            rows.append(torch.cat((low * cos - high * sin, high * cos + low * sin)))
        return torch.stack(rows)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(shape.num_layers):
        p = f"model.layers.{layer}."
        inner = norm(x, w[p + "input_layernorm.weight"])
        mixed = []
        for head in range(shape.num_heads):
            group = head // (shape.num_heads // shape.num_kv_heads)
            rows, kv_rows = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            q = turn(inner @ w[p + "self_attn.q_proj.weight"][rows].T)
            k = turn(inner @ w[p + "self_attn.k_proj.weight"][kv_rows].T)
            v = inner @ w[p + "self_attn.v_proj.weight"][kv_rows].T
            scores = (q @ k.T / size**0.5).masked_fill(~torch.ones(count, count).tril().bool(), -torch.inf)
            mixed.append(scores.softmax(-1) @ v)
        x = x + torch.cat(mixed, -1) @ w[p + "self_attn.o_proj.weight"].T
        inner = norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = inner @ w[p + "mlp.gate_proj.weight"].T, inner @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return x


def plain_greedy(tokens: list[int], max_reply: int) -> list[int]:
    head, gain = TENSORS["model.embed_tokens.weight"].double(), TENSORS["model.norm.weight"].double()
    reply: list[int] = []
    while len(reply) < max_reply and EOS not in reply:
        last = plain_hidden(tokens + reply)[-1]
        reply.append(int((head @ (last / (last.pow(2).mean() + SHAPE.rms_eps).sqrt() * gain)).argmax()))
    return reply


def sampler(num_slots: int, *, seed: int = 0, max_len: int = 40) -> Sampler:
    pieces = {"prefix": PREFIX, "opens": OPENS}
    return Sampler(
        FrozenTarget(SHAPE, TENSORS, numerics="fp32"),
        lambda text: pieces["prefix" if "system" in text else "opens"],
        eos_id=EOS,
        num_slots=num_slots,
        max_len=max_len,
        seed=seed,
        cache_dtype=torch.float32,
    )


@pytest.mark.covers(72)
def test_greedy_text_and_rows_equal_a_plain_forward() -> None:
    """More tasks than slots, of different lengths: refilling a slot leaves nothing of its last sequence."""
    turns = [[7], [11, 12, 13, 14, 15], [21, 22], [31, 32, 33], [41]]
    tasks = (Task(prompt=turn, temperature=0.0, max_reply=12, label=i) for i, turn in enumerate(turns))
    found = dict(sampler(2).run(tasks))
    assert sorted(found) == list(range(len(turns)))
    for label, turn in enumerate(turns):
        doc, prompt = found[label], PREFIX + turn + OPENS
        assert doc.tokens[: doc.prompt_len].tolist() == prompt
        assert doc.tokens[doc.prompt_len :].tolist() == plain_greedy(prompt, 12)
        rows = plain_hidden(doc.tokens[:-1].tolist()).float()
        torch.testing.assert_close(doc.hidden[:-1].float(), rows, rtol=2e-2, atol=2e-2)  # stored as bf16
        assert doc.hidden[-1].abs().sum() == 0


def test_a_self_written_turn_is_followed_by_the_template_and_a_reply() -> None:
    tasks = (Task(prompt=None, temperature=0.0, max_reply=6) for _ in range(40))
    documents = [doc for _, doc in sampler(8, max_len=80).run(tasks)]
    assert 3 < len(documents) < 40  # turns too short or too long are dropped
    shortest = min(documents, key=lambda doc: doc.prompt_len)
    prompt, reply = shortest.tokens[: shortest.prompt_len].tolist(), shortest.tokens[shortest.prompt_len :].tolist()
    assert reply == plain_greedy(prompt, 6)
    for doc in documents:
        tokens = doc.tokens.tolist()
        assert tokens[: len(PREFIX)] == PREFIX
        assert tokens[doc.prompt_len - len(OPENS) : doc.prompt_len] == OPENS
        assert EOS not in tokens[len(PREFIX) : doc.prompt_len - len(OPENS)]
        room = min(6, 80 - doc.prompt_len)  # a full slot ends the reply too
        assert tokens[doc.prompt_len :] == plain_greedy(tokens[: doc.prompt_len], 6)[:room]


def test_every_ask_about_an_article_gets_the_reply_of_a_fresh_conversation() -> None:
    """The slot goes back to the article's end: nothing of the first reply is left in the second."""
    asks = (Ask(closing=(11,), temperature=0.0), Ask(closing=(12, 13), temperature=0.0))
    task = Task(prompt=None, temperature=0.0, max_reply=6, opening=(7, 8), asks=asks, turn_len=8)
    documents = [doc for _, doc in sampler(4, max_len=220).run(iter([task] * 24))]
    both = [(a, b) for a, b in pairwise(documents) if a.prompt_len == 4 and b.prompt_len != 4 and starts_alike(a, b)]
    assert len(both) >= 3
    for first, second in both:
        article_len = second.prompt_len - len(OPENS) - 2
        tokens = second.tokens.tolist()
        assert tokens[:4] == [*PREFIX, 7, 8]
        assert article_len - len(PREFIX) >= 8
        assert EOS not in tokens[:10]  # the model may not end the turn before its length
        assert tokens[article_len : second.prompt_len] == [12, 13, *OPENS]
        assert tokens[second.prompt_len :] == plain_greedy(tokens[: second.prompt_len], 6)
        rows = plain_hidden(tokens[:-1]).float()
        torch.testing.assert_close(second.hidden[:-1].float(), rows, rtol=2e-2, atol=2e-2)
        assert first.tokens[article_len : article_len + 3].tolist() == [11, *OPENS]
        assert (first.greedy, second.greedy) == (False, True)  # the article was sampled


def starts_alike(first: Document, second: Document) -> bool:
    shared = second.prompt_len - len(OPENS) - 2
    return first.tokens[:shared].tolist() == second.tokens[:shared].tolist()


def test_the_same_seed_samples_the_same_text() -> None:
    def texts(seed: int) -> list[list[int]]:
        tasks = (Task(prompt=[i + 1], temperature=1.0, max_reply=8) for i in range(6))
        return [doc.tokens.tolist() for _, doc in sampler(3, seed=seed).run(tasks)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_int8_rows_do_not_depend_on_their_neighbours() -> None:
    target = FrozenTarget(SHAPE, TENSORS, numerics="int8")

    def row(others: list[int]) -> torch.Tensor:
        cache = SlotCache(SHAPE, 1 + len(others), 8, torch.float32)
        return target.step(torch.tensor([7, *others]), torch.zeros(1 + len(others), dtype=torch.long), cache)[0]

    assert torch.equal(row([]), row([40, 41, 42]))


def test_draw_follows_the_tempered_softmax() -> None:
    logits, heat = torch.tensor([[0.0, 1.0, 2.0]]), 0.7
    expected = torch.softmax(logits[0] / heat, -1)
    rows = 20_000
    random = torch.Generator().manual_seed(0)
    ids = draw(logits.expand(rows, -1), torch.full((rows,), heat), random)
    observed = torch.bincount(torch.tensor(ids), minlength=3)
    chi_squared = ((observed - rows * expected) ** 2 / (rows * expected)).sum()
    assert chi_squared < 13.8  # 2 degrees of freedom, p = 0.001
    wrong = torch.softmax(logits[0], -1)
    assert ((observed - rows * wrong) ** 2 / (rows * wrong)).sum() > 13.8
    assert draw(logits, torch.zeros(1), random) == [2]


def test_a_loop_is_a_long_tail_of_one_pattern() -> None:
    assert is_looping([1, 2, 3] * 32)
    assert not is_looping([1, 2, 3] * 31)
    assert not is_looping(list(range(96)))
