"""Objects against closed schemas: a field that is in no schema is a fault, as a value of the wrong type is.

Built-in kinds: the schemas in `kubernetes-validate`. KubeRay's: the `openAPIV3Schema` of its custom resource
definition, closed here (rules in CEL are not evaluated). PodMonitor, Certificate, Issuer: no package carries the
definitions of the Prometheus operator or of cert-manager, so the few fields that are used are written down here, from
their API references.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft7Validator

from tests.k8s.rendered import ROOT, Object

CRDS = Path(os.environ.get("SEQMTP_KUBERAY_CRDS", ROOT.parent / "shared" / "crds"))
RAY_SERVICE = CRDS / "ray.io_rayservices.yaml"
KUBERNETES = "1.33"

_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_NAME = {"type": "string", "pattern": "^[a-z0-9][a-z0-9-]*$"}
_HOURS = {"type": "string", "pattern": "^[0-9]+h$"}
_METADATA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": _LABELS,
        "annotations": _LABELS,
    },
}


def _closed(*required: str, **properties: Any) -> dict[str, Any]:
    """An object that has these properties and no other."""
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
    }


_ENDPOINT = {
    "type": "object",
    "required": ["port"],
    "additionalProperties": False,
    "properties": {name: {"type": "string"} for name in ("port", "path", "interval", "scheme", "scrapeTimeout")},
}
POD_MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"$ref": "#/definitions/metadata"},
        "spec": {
            "type": "object",
            "required": ["selector", "podMetricsEndpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {
                    "type": "object",
                    "required": ["matchLabels"],
                    "additionalProperties": False,
                    "properties": {"matchLabels": _LABELS},
                },
                "podMetricsEndpoints": {"type": "array", "minItems": 1, "items": _ENDPOINT},
            },
        },
    },
    "definitions": {"metadata": _METADATA},
}


def _cert_manager(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": "cert-manager.io/v1"},
            "kind": {"const": kind},
            "metadata": _METADATA,
            "spec": spec,
        },
    }


CERT_MANAGER = {
    "Issuer": _cert_manager(
        "Issuer",
        {
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
            "properties": {
                "selfSigned": {"type": "object", "maxProperties": 0},
                "ca": _closed("secretName", secretName=_NAME),
            },
        },
    ),
    "Certificate": _cert_manager(
        "Certificate",
        _closed(
            *("secretName", "issuerRef", "duration", "privateKey"),
            secretName=_NAME,
            issuerRef=_closed("name", "kind", name=_NAME, kind={"enum": ["Issuer", "ClusterIssuer"]}),
            isCA={"type": "boolean"},
            commonName={"type": "string"},
            dnsNames={"type": "array", "minItems": 1, "items": {"type": "string"}},
            usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
            duration=_HOURS,
            renewBefore=_HOURS,
            privateKey=_closed(
                *("algorithm", "size"),
                algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
                size={"type": "integer"},
                rotationPolicy={"enum": ["Always", "Never"]},
            ),
        ),
    ),
}


def schema_faults(objects: Sequence[Object]) -> list[str]:
    """A sentence for each fault. RayServices are passed over where KubeRay's definitions are not at hand."""
    return [f"{_name(each)}: {fault}" for each in objects for fault in _faults(each)]


def _faults(thing: Object) -> Iterator[str]:
    if thing["kind"] == "PodMonitor":
        yield from _by_schema(Draft7Validator(POD_MONITOR), thing)
    elif thing["kind"] in CERT_MANAGER:
        yield from _by_schema(Draft7Validator(CERT_MANAGER[thing["kind"]]), thing)
    elif thing["kind"] == "RayService":
        if RAY_SERVICE.exists():
            yield from _by_schema(_ray_service(), thing)
    else:
        try:
            kubernetes_validate.validate(dict(thing), KUBERNETES, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            yield str(error).splitlines()[0]


def _by_schema(validator: Draft7Validator, thing: Object) -> Iterator[str]:
    for error in validator.iter_errors(thing):
        yield f"{error.json_path}: {error.message[:200]}"


@lru_cache
def _ray_service() -> Draft7Validator:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    definition = yaml.load(RAY_SERVICE.read_text(), loader)
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = _METADATA
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["apiVersion"] = {"const": "ray.io/v1"}
    return Draft7Validator(schema)


def closed(schema: Any) -> Any:
    """The same schema, in which an object has no property that is not listed, and a quantity may be a number."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items() if key != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def _name(thing: Object) -> str:
    return f"{thing['kind']} {thing['metadata'].get('name')}"
