"""TLS in the manifests: who is told of a certificate has it, and it is one that its peers accept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

from tests.k8s.rendered import ROLES, Object, of_kind, pods
from tests.k8s.serve_config import settings_of


def issued(objects: Sequence[Object]) -> dict[str, Object]:
    """Certificates by the Secret that cert-manager puts them into."""
    return {each["spec"]["secretName"]: each["spec"] for each in of_kind(objects, "Certificate")}


def certificate_faults(objects: Sequence[Object]) -> Iterator[str]:
    """Whoever is told of a certificate has it, by the name that its peers look for, from one CA; or nobody has any."""
    settings, made = settings_of(objects), issued(objects)
    url = urlsplit(settings.store.url or "")
    rpc = settings.rpc
    files = [str(file) for file in (rpc.tls_certificate, rpc.tls_key, rpc.tls_ca) if file]
    if bool(made) != bool(files) or bool(made) != (url.scheme == "rediss"):
        yield f"certificates {sorted(made)}, gRPC's files {files}, the store at {settings.store.url}"
    if not made:
        return
    known = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    named = parse_qs(url.query)
    if set(named) != set(known):
        yield f"the store's URL names {sorted(named)}, TLS needs {known}"
    if sorted(files) != sorted(file for given in named.values() for file in given):
        yield "gRPC and the store's URL name different files"
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Issuer")}
    authorities = {spec["ca"]["secretName"] for spec in issuers.values() if "ca" in spec}
    for secret, spec in made.items():
        if spec["issuerRef"]["name"] not in issuers:
            yield f"{secret}: no issuer {spec['issuerRef']['name']}"
        if (secret in authorities) != spec.get("isCA", False):
            yield f"{secret}: a CA is what an issuer signs with, and nothing else"
    if not authorities <= made.keys():
        yield f"an issuer signs with {authorities}: nobody makes it"
    for pod in pods(objects):
        mounted = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
        found = [
            (volume["secret"]["secretName"], mounted[volume["name"]])
            for volume in pod.spec["volumes"]
            if volume.get("secret", {}).get("secretName") in made
        ]
        if pod.name in ROLES:
            names, place = {rpc.tls_server_name}, "/etc/seqmtp/tls"
        elif pod.name == "store":
            names, place = {"store", "store-0.store-peers", "store-1.store-peers"}, "/etc/store/tls"
        else:
            if found:
                yield f"{pod.name} has a certificate and no use for it"
            continue
        if [where for _, where in found] != [place]:
            yield f"{pod.name} has certificates at {found}, not at {place}"
            continue
        spec = made[found[0][0]]
        if not names <= {*spec.get("dnsNames", ())} or spec["issuerRef"]["name"] == "self-signed":
            yield f"{pod.name}: its certificate does not name {names}, or is not of the common CA"
        if not {"server auth", "client auth"} <= {*spec.get("usages", ())}:
            yield f"{pod.name} is a server and a client: its certificate must be for both"
    if {f"/etc/seqmtp/tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")} != {*files}:
        yield f"cert-manager makes tls.crt, tls.key and ca.crt, not {files}"
