"""A proposer of another model is told apart before it is used, and the reason names what differs."""

import pytest
from tiny_model import CONFIG, write_tiny_model

from seqmtp_serve.checkpoint.open import open_checkpoint
from services.rpc.identity import output_head_fingerprint
from services.rpc.wire import proposer
from services.target.fit import judge


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(str(write_tiny_model(tmp_path_factory.mktemp("model"))))


def info(checkpoint, **changes) -> proposer.ProposerInfo:
    shared = checkpoint.manifest.target.fingerprints
    fields = {
        "proposer_id": "proposer-1",
        "model": checkpoint.name,
        "hidden_size": CONFIG.hidden_size,
        "embedding_fingerprint": shared.embedding,
        "output_head_fingerprint": output_head_fingerprint(shared),
    }
    return proposer.ProposerInfo(**fields | changes)


def test_one_of_the_same_model_fits(checkpoint):
    assert judge(checkpoint)(info(checkpoint)) is None


@pytest.mark.covers(136)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "another model: other"),
        ({"hidden_size": 8}, "another hidden size: 8"),
        ({"embedding_fingerprint": "f00"}, "another embedding: f00"),
        ({"output_head_fingerprint": "f00"}, "another final norm and head: f00"),
    ],
)
def test_another_one_does_not_and_the_reason_says_why(checkpoint, change, words):
    assert words in judge(checkpoint)(info(checkpoint, **change))
