"""What int8 layers cost in quality: perplexity and greedy agreement against fp32 layers of the same weights.

    python -m seqmtp_serve.engine.quality MODEL TEXT.jsonl [--num-texts N] [--num-tokens T]

TEXT.jsonl holds a {"text"} or {"turns"} object a line. Every position of every text counts once. Perplexity is of the
text itself, the divergence KL(fp32 || int8) is in nats a token, agreement is that of the two greedy choices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path

import torch
from torch import Tensor

from seqmtp_serve.checkpoint.open import open_checkpoint
from seqmtp_serve.config import EngineConfig
from seqmtp_serve.engine.caches import PagedCache
from seqmtp_serve.engine.pages import Owner
from seqmtp_serve.model.attention import Span
from seqmtp_serve.model.family import build_trunk, numerics_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The comparison over `num_tokens` positions."""

    num_tokens: int
    perplexity_fp32: float
    perplexity_int8: float
    divergence: float
    greedy_agreement: float
    int8_levels: int


class TextScorer:
    """Log-probabilities of whole texts under one form of the weights."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        checkpoint = open_checkpoint(model)
        self.numerics = numerics_for(config, checkpoint.config)
        self._trunk = build_trunk(
            checkpoint.target_tensors(), checkpoint.config, config.page_size, config.max_model_len, self.numerics
        )
        self._cache = PagedCache(Owner.TARGET, config, checkpoint.config, checkpoint.config.num_layers)

    @torch.inference_mode()
    def log_probs(self, token_ids: Sequence[int]) -> Tensor:
        """`[T, V]`: row t is the distribution of token t + 1."""
        pool = self._cache.pool
        lease = pool.open()
        pool.grow(lease, len(token_ids))
        span = Span(pages=pool.pages(lease), start=0, num_rows=len(token_ids))
        state_Td = self._trunk.forward(token_ids, [span], self._cache.kv_LSE)
        pool.close(lease)
        return self._trunk.logits(state_Td).log_softmax(-1)


def compare(model: str, texts: Sequence[str], *, num_tokens: int = 512) -> Quality:
    """Score each text, cut to its first `num_tokens` tokens, under both forms."""
    tokenizer = open_checkpoint(model).tokenizer()
    config = EngineConfig(num_pages=32, max_model_len=max(64, num_tokens))
    int8 = TextScorer(model, config)
    fp32 = TextScorer(model, EngineConfig(num_pages=32, max_model_len=config.max_model_len, weights="fp32"))
    loss_fp32 = loss_int8 = divergence = 0.0
    num_agreed = num_rows = num_labels = 0
    for text in texts:
        ids = tokenizer.encode(text).ids[:num_tokens]
        ours_TV, reference_TV = int8.log_probs(ids), fp32.log_probs(ids)
        label_T1 = torch.tensor(ids[1:])[:, None]
        loss_int8 -= float(ours_TV[:-1].gather(1, label_T1).sum())
        loss_fp32 -= float(reference_TV[:-1].gather(1, label_T1).sum())
        divergence += float((reference_TV.exp() * (reference_TV - ours_TV)).sum())
        num_agreed += int((reference_TV.argmax(-1) == ours_TV.argmax(-1)).sum())
        num_rows, num_labels = num_rows + len(ids), num_labels + len(ids) - 1
    return Quality(
        num_tokens=num_rows,
        perplexity_fp32=exp(loss_fp32 / num_labels),
        perplexity_int8=exp(loss_int8 / num_labels),
        divergence=divergence / num_rows,
        greedy_agreement=num_agreed / num_rows,
        int8_levels=int8.numerics.int8_levels,
    )


def read_texts(path: Path, num_texts: int) -> list[str]:
    """Up to `num_texts` texts, spread evenly over the file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = lines[:: max(1, len(lines) // num_texts)][:num_texts]
    return [line["text"] if "text" in line else "\n".join(line["turns"]) for line in chosen]


def main() -> None:
    """Print the comparison as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--num-texts", type=int, default=24)
    parser.add_argument("--num-tokens", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    quality = compare(args.model, read_texts(args.texts, args.num_texts), num_tokens=args.num_tokens)
    print(json.dumps(asdict(quality), indent=2))


if __name__ == "__main__":
    main()
