"""An opened checkpoint: its record, its configuration, its text side, and its tensors behind two gates."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from seqmtp_serve.checkpoint import family, names
from seqmtp_serve.checkpoint.deepseek_names import is_read_by
from seqmtp_serve.checkpoint.fingerprint import file_fingerprint, tensor_fingerprint
from seqmtp_serve.checkpoint.gates import Gate, GateReport, failed_gate, mtp_gate, target_gate
from seqmtp_serve.checkpoint.gguf_reader import GgufSource
from seqmtp_serve.checkpoint.locate import Location
from seqmtp_serve.checkpoint.manifest import Fingerprints, Manifest, TargetManifest, canonical_json
from seqmtp_serve.checkpoint.parts import MtpPart, TargetPart
from seqmtp_serve.checkpoint.tensor_source import JoinedTensors, LazyTensors, TensorSource
from seqmtp_serve.checkpoint.tokenizer import gguf_tokenizer, hf_tokenizer
from seqmtp_serve.errors import MtpIncomplete, TargetIncomplete
from seqmtp_serve.model.config import LlamaConfig, MtpConfig
from seqmtp_serve.model.family import ModelConfig


class Checkpoint:
    """Made by `open_checkpoint`. Nothing of it changes after that."""

    def __init__(self, location: Location, target: TargetPart, mtp: MtpPart | MtpIncomplete | None) -> None:
        self._location, self._target, self._mtp = location, target, mtp
        shared = [names.EMBEDDING, names.FINAL_NORM]
        if not target.config.tie_word_embeddings:
            shared.append(names.HEAD)
        self._shared_names = tuple(shared)
        self._tensors = LazyTensors(target.source, family.target_shapes(target.config), error=TargetIncomplete)

    @property
    def name(self) -> str:
        return self._location.name

    @property
    def path(self) -> Path:
        """The target's folder, or its GGUF file."""
        return self._location.target

    @property
    def config(self) -> ModelConfig:
        return self._target.config

    @property
    def dense_config(self) -> LlamaConfig:
        """For what computes dense models only. Raises TargetIncomplete for another family."""
        if not isinstance(self.config, LlamaConfig):
            raise TargetIncomplete(f"{self.name}: this needs a dense llama target, it is {self._target.family}")
        return self.config

    @property
    def mtp_config(self) -> MtpConfig | None:
        """None when there is no MTP part, or its manifest cannot be read."""
        return self._mtp.manifest.config() if isinstance(self._mtp, MtpPart) else None

    @property
    def chat_template(self) -> str:
        """Jinja source; empty when the checkpoint has none."""
        return self._target.text.chat_template

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._target.text.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return self._target.text.bos_token_id

    @property
    def add_bos(self) -> bool:
        """Whether a plain prompt (not one the chat template made) begins with `bos_token_id`."""
        return self._target.text.add_bos

    @property
    def target_source(self) -> TensorSource:
        """The target's files, for inspection."""
        return self._target.source

    @property
    def mtp_source(self) -> TensorSource | None:
        """The MTP part's files, for inspection; None when they cannot be opened."""
        return self._mtp.source if isinstance(self._mtp, MtpPart) else None

    @property
    def mtp_layer_names(self) -> frozenset[str]:
        """Tensors in the target's own files that are the MTP gate's business."""
        layers = self._target.later_layers if self._shares_files else ()
        prefixes = tuple(names.layer_prefix(layer) for layer in layers)
        return frozenset(name for name in self._target.source.specs if name.startswith(prefixes))

    @property
    def quantization(self) -> str:
        """How the target's weights are stored, in the word of a manifest; a GGUF names it for each tensor."""
        return self._target.quantization

    def tokenizer(self) -> Tokenizer:
        """A new tokenizer. Raises TargetIncomplete when the checkpoint has none that can be read."""
        source = self._target.source
        return (
            gguf_tokenizer(source.metadata) if isinstance(source, GgufSource) else hf_tokenizer(self._location.target)
        )

    def target_tensors(self, experts: Container[int] | None = None) -> Mapping[str, Tensor]:
        """float32 tensors by Hugging Face name, read on access (raises TargetIncomplete for non-finite values).

        A rank of an expert-parallel group names its `experts`: the others' weights are not in the mapping, so they
        cannot be read. Without `lm_head.weight` when the head is tied. Raises TargetIncomplete when the headers fail
        the gate.
        """
        self._target_gate(deep=False).require()
        own = [name for name in self._tensors if is_read_by(name, experts)]
        return JoinedTensors(dict.fromkeys(own, self._tensors))

    def mtp_tensors(self, experts: Container[int] | None = None) -> Mapping[str, Tensor]:
        """The MTP layers by released name, and the target's own embedding, final norm and (untied) head.

        `experts` as above. Raises MtpIncomplete when there is no MTP part or its gate (headers, declarations,
        fingerprints) fails, and on access for values that are not finite or not those the manifest declares.
        """
        gate = self._mtp_gate(deep=False)
        if gate is None or not isinstance(self._mtp, MtpPart):
            raise MtpIncomplete(f"{self.name}: has no MTP part") if gate is None else MtpIncomplete(str(self._mtp))
        gate.require()
        manifest = self._mtp.manifest
        shapes = [name for name in family.mtp_layer_shapes(self.config, manifest.config()) if is_read_by(name, experts)]
        own = [names.layer_prefix(layer) + name for layer in manifest.mtp_layer_ids for name in shapes]
        declared = dict(manifest.tensor_fingerprints)
        layers = LazyTensors(self._mtp.source, own, error=MtpIncomplete, fingerprints=declared)
        return JoinedTensors(dict.fromkeys(own, layers) | dict.fromkeys(self._shared_names, self._tensors))

    def gates(self, *, deep: bool = True) -> GateReport:
        """Judge both parts by headers and fingerprints; `deep` also by every value (one tensor in memory at a time)."""
        return GateReport(target=self._target_gate(deep=deep), mtp=self._mtp_gate(deep=deep))

    @cached_property
    def manifest(self) -> Manifest:
        """The immutable record. Reads the shared tensors; raises TargetIncomplete when they cannot be read."""
        config, contract = self.config, family.contract_of(self.config)
        target = TargetManifest(
            name=self.name,
            family=contract.architecture,
            source_digest=self._source_digest(),
            num_main_layers=config.num_layers,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            rope=contract.rope,
            tied_head=config.tie_word_embeddings,
            fingerprints=self._fingerprints,
            storage_dtypes=tuple(sorted({spec.dtype for spec in self._target.source.specs.values()})),
            cache_layout=contract.cache_layout,
            expert_layout=contract.expert_layout,
            quantization=self._target.quantization,
        )
        return Manifest(target=target, mtp=self._mtp.manifest if isinstance(self._mtp, MtpPart) else None)

    @cached_property
    def _fingerprints(self) -> Fingerprints:
        digests = {name: tensor_fingerprint(self._tensors[name]) for name in self._shared_names}
        return Fingerprints(
            embedding=digests[names.EMBEDDING],
            output_norm=digests[names.FINAL_NORM],
            head=digests.get(names.HEAD, digests[names.EMBEDDING]),
        )

    def _source_digest(self) -> str:
        if self._location.target.is_file():
            return file_fingerprint(self._location.target)
        headers = {
            name: [list(spec.shape), spec.dtype, spec.file.name] for name, spec in self.target_source.specs.items()
        }
        return hashlib.sha256(canonical_json(headers).encode()).hexdigest()

    def _target_gate(self, *, deep: bool) -> Gate:
        return target_gate(self._target, self._target.later_layers if self._shares_files else (), deep=deep)

    @property
    def _shares_files(self) -> bool:
        """Whether layers beyond the main ones, in the target's own files, are an MTP part: the MTP gate's business."""
        return self._target.num_mtp_layers is not None or self._location.mtp == self._location.target

    def _mtp_gate(self, *, deep: bool) -> Gate | None:
        if self._mtp is None:
            return None
        if isinstance(self._mtp, MtpIncomplete):
            return failed_gate(self._mtp)
        try:
            shared = self._fingerprints
        except TargetIncomplete:
            shared = None
        return mtp_gate(self._mtp, self._target, shared, deep=deep)
