"""Two gates, judged apart: is the target complete, and is the MTP part complete and made for this target.

A gate only lists problems; whoever needs the part calls `require`. A broken MTP part never stops target-only use, and
nothing here looks at what the numbers mean: a wrongly *declared* fusion order passes (no value reveals it), an
undeclared one does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from seqmtp_serve.checkpoint import gate_declarations as declared
from seqmtp_serve.checkpoint import gate_tensors as checks
from seqmtp_serve.checkpoint import names
from seqmtp_serve.checkpoint.fingerprint import tensor_fingerprint
from seqmtp_serve.checkpoint.manifest import Fingerprints
from seqmtp_serve.checkpoint.mtp_manifest import MtpManifest
from seqmtp_serve.checkpoint.problem import Problem, ProblemKind
from seqmtp_serve.checkpoint.tensor_source import TensorSource
from seqmtp_serve.errors import CheckpointError, MtpIncomplete, TargetIncomplete
from seqmtp_serve.model.config import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate's verdict. `error` is raised by `require` and carries the first problem and the count of the rest."""

    name: str
    problems: tuple[Problem, ...]
    error: type[CheckpointError]

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> None:
        """Raise this gate's error unless it passed."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise self.error(f"{self.problems[0]}{more}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Both verdicts. `mtp` is None when no MTP part was given: nothing is wrong then, there is just no speculation."""

    target: Gate
    mtp: Gate | None


def target_gate(config: LlamaConfig, source: TensorSource, mtp_layers: Iterable[int], *, deep: bool) -> Gate:
    """Names, shapes and dtypes from headers; with `deep` also every value, and a duplicate head against its tie.

    `mtp_layers` are layer ids that may share the files and are not the target's to judge.
    """
    expected = names.llama_target_shapes(config)
    foreign = tuple(names.layer_prefix(layer) for layer in mtp_layers)
    allowed = {names.HEAD} if config.tie_word_embeddings else set()
    present = {name for name in source.specs if not name.startswith(foreign)}
    problems = list(checks.header_problems(source, expected, present, allowed))
    sound = present - {problem.subject for problem in problems}
    if deep:
        problems += checks.value_problems(source, sorted(sound & expected.keys()))
        if sound >= allowed | {names.EMBEDDING} and allowed:
            embedding = tensor_fingerprint(source.read(names.EMBEDDING))
            problems += checks.fingerprint_problems(source, names.HEAD, embedding)
    return Gate(name="target", problems=tuple(problems), error=TargetIncomplete)


def mtp_gate(
    manifest: MtpManifest,
    config: LlamaConfig,
    source: TensorSource,
    target: Fingerprints | None,
    *,
    own_files: bool,
    deep: bool,
) -> Gate:
    """The declarations against the target, then names, shapes, sub-vocabulary; with `deep` every value as well.

    `target` is None when the target's shared tensors cannot be read: then this gate cannot pass either. `own_files`
    says that the source holds nothing but MTP layers.
    """
    problems = list(declared.declaration_problems(manifest, config))
    if target is None:
        detail = "the target's own tensor cannot be read, so nothing can be made for it"
        problems.append(Problem(kind=ProblemKind.UNREADABLE, subject=names.EMBEDDING, detail=detail))
    elif not problems:
        problems += declared.fingerprint_problems(manifest, target)
        problems += _layer_problems(manifest, config, source, target, own_files=own_files, deep=deep)
    return Gate(name="mtp", problems=tuple(problems), error=MtpIncomplete)


def failed_gate(error: CheckpointError) -> Gate:
    """The gate of an MTP part that could not even be opened."""
    subject, _, detail = str(error).partition(": ")
    problem = Problem(kind=ProblemKind.DECLARATION, subject=subject, detail=detail or str(error))
    return Gate(name="mtp", problems=(problem,), error=MtpIncomplete)


def _layer_problems(
    manifest: MtpManifest,
    config: LlamaConfig,
    source: TensorSource,
    target: Fingerprints,
    *,
    own_files: bool,
    deep: bool,
) -> Iterator[Problem]:
    prefixes = tuple(names.layer_prefix(layer) for layer in manifest.mtp_layer_ids)
    shapes = names.mtp_layer_shapes(config, manifest.config())
    expected = {prefix + name: shape for prefix in prefixes for name, shape in shapes.items()}
    duplicates = {"embed_tokens.weight": target.embedding, "shared_head.head.weight": target.head}
    if manifest.final_norm_owner == "main":
        duplicates[names.SHARED_NORM] = target.output_norm
    copies = {prefix + name: wanted for prefix in prefixes for name, wanted in duplicates.items()}
    present = {name for name in source.specs if own_files or name.startswith(prefixes)}

    header = list(checks.header_problems(source, expected, present, copies.keys()))
    yield from header
    sound = present - {problem.subject for problem in header}
    for name in sorted(sound):
        if name.endswith(names.DRAFT_TOKEN_IDS):
            yield from checks.draft_vocab_problems(source, name, config.vocab_size)
    if deep:
        yield from checks.value_problems(source, sorted(sound & expected.keys()))
        wanted = copies | dict(manifest.tensor_fingerprints)
        for name in sorted(sound & wanted.keys()):
            yield from checks.fingerprint_problems(source, name, wanted[name])
