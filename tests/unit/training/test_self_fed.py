"""Self-fed acceptance, on models whose drafts are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_run import make_corpus, trainer_in
from tiny_v3 import CONFIG, tiny_v3

from seqmtp_serve.errors import BadCorpus, TrainingError
from seqmtp_serve.model.config import MtpConfig
from seqmtp_serve.training.joint.continuations import best_next, plain_reply
from seqmtp_serve.training.joint.corpus import Corpus, read_corpus
from seqmtp_serve.training.joint.evaluate import evaluate
from seqmtp_serve.training.joint.self_fed import self_fed
from seqmtp_serve.training.v3.model import V3Model


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return read_corpus(make_corpus(tmp_path_factory.mktemp("corpus")), "held_out", CONFIG.vocab_size)


def counting_model(*, order_is_right: bool = True) -> V3Model:
    """Blocks that add nothing, a head that answers x with x+1, a fusion that passes the embedding."""
    model = tiny_v3(mtp=MtpConfig(fed_hidden="post", recycled_hidden="post")).eval()
    d, vocab = CONFIG.hidden_size, CONFIG.vocab_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            if "norm" in name:
                parameter.fill_(1.0)
        embedding = torch.nn.functional.normalize(torch.randn(vocab, d), dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(embedding.roll(1, 0))  # row x+1 looks like x
        passing = torch.cat((torch.eye(d), torch.zeros(d, d)), 1)
        model.mtp_layer(1).eh_proj.weight.copy_(passing if order_is_right else passing.roll(d, 1))
    return model


@pytest.mark.covers(54, 95)
def test_perfect_drafts_are_all_accepted_and_misplaced_ones_none(held_out: Corpus) -> None:
    right = self_fed(counting_model(), held_out, prompts=2, prompt_len=5, reply_len=8, depth=3)
    assert right["by_position"] == [1.0, 1.0, 1.0]
    assert right["e_r"] == 4.0
    assert right["rounds"] == 2 * 2  # each moves by four tokens, of the eight of a reply
    wrong = self_fed(counting_model(order_is_right=False), held_out, prompts=2, prompt_len=5, reply_len=8, depth=3)
    assert wrong["by_position"] == [0.0, 0.0, 0.0]


@pytest.mark.covers(54)
def test_the_reply_is_the_models_own() -> None:
    assert plain_reply(counting_model(), [7, 3], best_next, 4) == [4, 5, 6, 7]


@pytest.mark.covers(54, 95)
def test_seeded_drafts_share_the_noise_of_their_text(held_out: Corpus) -> None:
    """A module that knows the target's distribution is always right, at any temperature."""
    figures = {"prompts": 2, "prompt_len": 5, "reply_len": 8, "depth": 3}
    found = self_fed(counting_model(), held_out, **figures, temperature=0.9)
    assert found["by_position"] == [1.0, 1.0, 1.0]
    assert self_fed(tiny_v3(2).eval(), held_out, **figures)["rounds"] > 0  # two modules: the plain reference
    with pytest.raises(TrainingError, match="evaluate at temperature 0"):
        self_fed(tiny_v3(2).eval(), held_out, **figures, temperature=0.9)
    with pytest.raises(BadCorpus, match="longer than a prompt"):
        self_fed(counting_model(), held_out, **figures | {"prompt_len": 60})


@pytest.mark.covers(54, 95, 147)
def test_self_fed_and_teacher_forced_are_other_figures(tmp_path: Path, held_out: Corpus) -> None:
    """Positions fall off, since a draft counts only behind accepted ones; the teacher-forced one has another name."""
    trainer = trainer_in(tmp_path / "run", make_corpus(tmp_path / "corpus"))
    for _ in trainer.run(save_every_s=1e9, until=30):
        pass
    model = trainer.model.eval()
    drafted = self_fed(model, held_out, prompts=3, prompt_len=6, reply_len=10, depth=3)
    one, two, three = drafted["by_position"]
    assert 1.0 >= one >= two >= three >= 0.0
    assert drafted["rollout"] == "recurrent"  # two modules, three positions: the third runs module one again
    forced = evaluate(model, held_out, window=24, most_tokens=100)["mtp_assisted"]
    assert {line["fed"] for line in forced} == {"teacher-forced"}
    assert drafted["fed"] == "self-fed"
