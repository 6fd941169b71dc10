"""The served rollout is the one training assumes: the same chains from the same rows, module for module."""

from __future__ import annotations

import pytest
import torch
from engines import MTP, TARGET, config, request
from torch import Tensor

from seqmtp_serve import oracle
from seqmtp_serve.engine.proposer import ProposerEngine
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.model.synthetic import TINY
from seqmtp_serve.ports import FeedRows
from seqmtp_serve.request import Ref
from seqmtp_serve.training.acceptance import proposals
from seqmtp_serve.training.loss import Frozen
from seqmtp_serve.training.mtp_module import MtpModule
from seqmtp_serve.training.shards import Document

PREFIX = f"model.layers.{TINY.num_layers}."
PROMPT_LEN = 6


def trained_chains(tokens: list[int], hidden: Tensor, draft_ids: Tensor) -> list[list[int]]:
    """What training proposes from every base of the reply."""
    module = MtpModule(TINY)
    own = {name.removeprefix(PREFIX): tensor for name, tensor in MTP.items() if name.startswith(PREFIX)}
    own.pop("draft_token_ids")
    module.load_state_dict(own)
    frozen = Frozen(
        embed_Vd=MTP["model.embed_tokens.weight"],
        norm_d=MTP["model.norm.weight"],
        head_Vd=MTP["lm_head.weight"][draft_ids.long()],
        norm_eps=TINY.rms_eps,
    )
    document = Document(tokens=torch.tensor(tokens), hidden=hidden, prompt_len=PROMPT_LEN, greedy=True)
    return proposals(module, document, frozen, draft_ids, depth=3).tolist()


@pytest.mark.covers(23, 24, 53, 111)
def test_served_chains_are_the_trained_ones() -> None:
    tokens = torch.randint(TINY.vocab_size, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    hidden = oracle.forward(TARGET, TINY, tokens)[1]
    trained = trained_chains(tokens, hidden, MTP[f"{PREFIX}draft_token_ids"])
    engine = ProposerEngine(config(), TINY, MtpConfig(), MTP)
    served, first = [], 0
    for base in range(PROMPT_LEN - 1, len(tokens) - 1):
        feed = FeedRows(
            ref=Ref(request_id="r", epoch=1, version=base, digest=b""),
            first_base=first,
            hidden=hidden[first : base + 1],
            next_ids=tuple(tokens[first + 1 : base + 2]),
            depth=3,
            reset=first == 0,
            request=request() if first == 0 else None,
        )
        (draft,) = engine.propose([feed])
        served.append(list(draft.tokens))
        first = base + 1
    assert served == trained
    assert len({tuple(chain) for chain in served}) > 10
