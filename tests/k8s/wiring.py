"""Whether the objects fit each other: names, ports, labels, keys, times. Each fault is a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from ray.scripts.scripts import start as ray_start

from services.gateway.routes_service import service_routes
from services.processes import GOODBYE_S
from tests.k8s.certificates import certificate_faults, issued
from tests.k8s.files import file_faults
from tests.k8s.rendered import ROLES, Object, Pod, of_kind, pods, ray_service, selects
from tests.k8s.serve_config import environment, serve_config, settings_of

SECRETS = {("seqmtp-store", "password"), ("seqmtp-gcs-store", "password"), ("seqmtp-api-key", "key")}
PRE_STOP_S = {"frontend": 90, "target": 30, "proposer": 30}  # what the preStop commands take at most
SERVE_DRAINS_S = 35  # a gateway stays reachable so long behind HAProxy: Ray's minimum of 30 s and its margin
RESOURCES = {"cpu", "memory", "storage", "nvidia.com/gpu"}
DIRECTIVES = {
    *("dir", "appendonly", "appendfsync", "save", "maxmemory", "maxmemory-policy"),
    *("min-replicas-to-write", "min-replicas-max-lag", "replica-read-only"),
}


def wiring_faults(objects: Sequence[Object]) -> list[str]:
    """Every kind of fault that a schema cannot see."""
    checks = (
        _selectors,
        _ports,
        _resources,
        _references,
        _secrets,
        _probes,
        _times,
        _security,
        _ray_start,
        _durability,
        _rpc,
        certificate_faults,
        file_faults,
    )
    return [fault for check in checks for fault in check(objects)]


def _selectors(objects: Sequence[Object]) -> Iterator[str]:
    """Each selector finds a pod, and means a kind of pod by the labels that kind has."""
    for thing in objects:
        name = f"{thing['kind']} {thing['metadata']['name']}"
        if thing["metadata"].get("namespace", "seqmtp") != "seqmtp":
            yield f"{name} is in another namespace"
        for selector in _pod_selectors(thing):
            if not any(selects(selector, pod.labels) for pod in pods(objects)):
                yield f"{name} selects no pod: {selector}"


def _pod_selectors(thing: Object) -> Iterator[Any]:
    spec = thing.get("spec", {})
    match thing["kind"]:
        case "Service":
            yield {"matchLabels": spec["selector"]}
        case "PodDisruptionBudget" | "PodMonitor" | "StatefulSet":
            yield spec["selector"]
            pod = spec.get("template", {}).get("spec", {})
            affinity = pod.get("affinity", {}).get("podAntiAffinity", {})
            for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", ()):
                yield term["labelSelector"]
        case "NetworkPolicy":
            peers = [peer for rule in spec.get("ingress", ()) for peer in rule.get("from", ())]
            peers += [peer for rule in spec.get("egress", ()) for peer in rule.get("to", ())]
            found = [spec["podSelector"], *(peer["podSelector"] for peer in peers if "namespaceSelector" not in peer)]
            yield from (each for each in found if each != {"matchLabels": {"ray.io/node-type": "redis-cleanup"}})
        case "RayService":
            for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
                for spread in group["template"]["spec"].get("topologySpreadConstraints", ()):
                    yield spread["labelSelector"]


def _ports(objects: Sequence[Object]) -> Iterator[str]:
    """Services and PodMonitors name ports that their pods have; policies open ports on which somebody listens."""
    dialled = {"store": 6379, "store-peers": 6379, "gcs-store": 6379, "seqmtp": 80}
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            if port["port"] != dialled[service["metadata"]["name"]]:
                yield f"Service {service['metadata']['name']} is at {port['port']}: nobody dials that"
            for pod in pods(objects):
                if selects({"matchLabels": service["spec"]["selector"]}, pod.labels) and not pod.port(
                    port["targetPort"]
                ):
                    yield f"Service {service['metadata']['name']}: {pod.name} has no port {port['targetPort']}"
    for monitor in of_kind(objects, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for pod in pods(objects):
                if selects(monitor["spec"]["selector"], pod.labels) and not pod.port(endpoint["port"]):
                    yield f"PodMonitor {monitor['metadata']['name']}: {pod.name} has no port {endpoint['port']}"
    for policy in of_kind(objects, "NetworkPolicy"):
        name, spec = policy["metadata"]["name"], policy["spec"]
        for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
            if not rule.get("ports"):
                yield f"NetworkPolicy {name} has a rule that names no port"
        for rule in spec.get("ingress", ()):
            chosen = [pod for pod in pods(objects) if selects(spec["podSelector"], pod.labels)]
            heard = set().union(*(_listens(pod) for pod in chosen)) if chosen else set()
            for port in rule.get("ports", ()):
                if (port["port"], port.get("endPort", port["port"])) not in heard:
                    yield f"NetworkPolicy {name} opens {port}: nobody listens there"


def _listens(pod: Pod) -> set[tuple[int, int]]:
    """Ports and ranges on which a pod listens."""
    heard = {(port["containerPort"],) * 2 for port in pod.container.get("ports", ())}
    if pod.is_ray:
        given = pod.group["rayStartParams"]
        names = ("node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-grpc-port")
        heard |= {(int(given[name]),) * 2 for name in names}
        heard |= {(int(given["min-worker-port"]), int(given["max-worker-port"])), (52365, 52365), (30000, 31000)}
        if pod.group.get("numOfHosts", 1) > 1:
            heard.add((32768, 60999))
    return heard


def _resources(objects: Sequence[Object]) -> Iterator[str]:
    """Schemas take any name for a resource; a scheduler takes only those that nodes have."""
    for thing in objects:
        for amounts in _amounts(thing):
            for name in {*amounts} - RESOURCES:
                yield f"{thing['kind']} {thing['metadata']['name']} asks for {name}"


def _amounts(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _amounts(each)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("requests", "limits"):
                yield inner
            else:
                yield from _amounts(inner)


def _references(objects: Sequence[Object]) -> Iterator[str]:
    """ConfigMaps, accounts, claims and mounts that are named are there."""
    there = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for pod in pods(objects):
        spec = pod.spec
        wanted = [("ServiceAccount", spec["serviceAccountName"])]
        wanted += [("ConfigMap", source["configMapRef"]["name"]) for source in pod.container.get("envFrom", ())]
        for volume in spec.get("volumes", ()):
            if "configMap" in volume:
                wanted.append(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                wanted.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        yield from (f"{pod.name} names {kind} {name}: it is not there" for kind, name in {*wanted} - there)
        claims = ["data"] if not pod.is_ray else []
        volumes = {volume["name"] for volume in spec["volumes"]} | {*claims}
        if {mount["name"] for mount in pod.container["volumeMounts"]} != volumes:
            yield f"{pod.name}: its mounts are not its volumes"
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    for each in of_kind(objects, "StatefulSet"):
        if each["spec"]["serviceName"] not in services:
            yield f"StatefulSet {each['metadata']['name']} names no Service"
    address = ray_service(objects)["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    if (address.split(":")[0], address.split(":")[1]) != ("gcs-store", "6379"):
        yield f"Ray's own store is not {address}"
    settings = settings_of(objects)
    url = urlsplit(settings.store.url or "")
    if (url.hostname, url.port) != ("store", 6379):
        yield f"no Service is the store at {settings.store.url}"
    if url.username != _store_user(objects):
        yield f"the store knows no user {url.username}"
    for pod in pods(objects) if settings.model.path.startswith("/") else ():
        mounts = [mount["mountPath"] for mount in pod.container["volumeMounts"]]
        is_there = any(settings.model.path.startswith(f"{mount}/") for mount in mounts)
        if pod.is_ray and pod.name != "headgroup" and not is_there:
            yield f"{pod.name} has nothing mounted at {settings.model.path}"


def _secrets(objects: Sequence[Object]) -> Iterator[str]:
    """Secrets are named, never shipped."""
    if of_kind(objects, "Secret"):
        yield "a Secret is in the manifests"
    named: set[tuple[str, str]] = set()
    for pod in pods(objects):
        for volume in pod.spec.get("volumes", ()):
            if "secret" in volume and volume["secret"]["secretName"] not in issued(objects):
                named |= {(volume["secret"]["secretName"], item["key"]) for item in volume["secret"]["items"]}
    reference = ray_service(objects)["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]
    named.add((reference["secretKeyRef"]["name"], reference["secretKeyRef"]["key"]))
    if named != SECRETS:
        yield f"Secrets {sorted(named)}, documented are {sorted(SECRETS)}"


def _probes(objects: Sequence[Object]) -> Iterator[str]:
    """Probes ask ports and paths that exist; every pod but Ray's head (KubeRay's own) has a readiness probe."""
    paths = {getattr(route, "path", "") for route in service_routes(None, None).routes}  # type: ignore[arg-type]
    for pod in pods(objects):
        if pod.name != "headgroup" and "readinessProbe" not in pod.container:
            yield f"{pod.name} has no readiness probe"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = pod.container.get(kind, {})
            asked = probe.get("httpGet") or probe.get("tcpSocket")
            if asked and (not pod.port(asked["port"]) or asked.get("path", "/health") not in paths):
                yield f"{pod.name}: {kind} asks {asked}"
            if probe and not (asked or probe.get("exec")):
                yield f"{pod.name}: {kind} asks nothing"
    for monitor in of_kind(objects, "PodMonitor"):
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["path"] not in paths:
                yield f"PodMonitor {monitor['metadata']['name']} scrapes {endpoint['path']}"


def _times(objects: Sequence[Object]) -> Iterator[str]:
    """A pod is given longer to end than its drain takes, and a cluster longer than its pods."""
    service = ray_service(objects)
    (app,) = serve_config(objects)["applications"]
    drain_s = {each["name"]: each.get("graceful_shutdown_timeout_s", 10) for each in app["deployments"]}
    ends_within_s = settings_of(objects).drain_s + GOODBYE_S
    for each in app["deployments"]:
        if each.get("graceful_shutdown_timeout_s", ends_within_s) < ends_within_s:
            yield f"{each['name']} is killed while it drains"
    for pod in pods(objects):
        if pod.name in ROLES:
            grace_s = pod.spec["terminationGracePeriodSeconds"]
            needed_s = PRE_STOP_S[pod.name] + (SERVE_DRAINS_S if pod.name == "frontend" else 10)
            if pod.container["lifecycle"]["preStop"]["exec"]["command"] != _pre_stop(pod.name):
                yield f"{pod.name}: preStop is not the command whose time is known"
            if grace_s < needed_s or (grace_s < drain_s["Gateway"] + SERVE_DRAINS_S and pod.name == "frontend"):
                yield f"{pod.name} is killed after {grace_s} s: its drain takes up to {needed_s} s"
            if grace_s <= ends_within_s:
                yield f"{pod.name} is killed after {grace_s} s: its replicas drain for up to {ends_within_s} s"
            if service["rayClusterDeletionDelaySeconds"] <= grace_s:
                yield "an old cluster goes before its pods have drained"
        if not 30 <= pod.spec.get("terminationGracePeriodSeconds", 0) <= 600:
            yield f"{pod.name}: no grace to end in"


def _pre_stop(name: str) -> list[str]:
    sleep = "sleep 60; " if name == "frontend" else ""
    return ["bash", "-c", f"{sleep}ray stop --grace-period 30"]


def _security(objects: Sequence[Object]) -> Iterator[str]:
    """What the namespace's `restricted` standard asks of every pod, and no API token where none is used."""
    (namespace,) = of_kind(objects, "Namespace")
    if namespace["metadata"]["labels"] != {"pod-security.kubernetes.io/enforce": "restricted"}:
        yield "the namespace enforces nothing"
    for pod in pods(objects):
        whole, own = pod.spec["securityContext"], pod.container["securityContext"]
        if not (whole.get("runAsNonRoot") and whole.get("runAsUser") and whole.get("seccompProfile")):
            yield f"{pod.name} may run as root, or without a seccomp profile"
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{pod.name} may raise its privileges"
        if pod.name != "headgroup" and pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name} has an API token"
        if not pod.container["resources"].get("limits", {}).get("memory"):
            yield f"{pod.name} may take all memory of its node"
    for budget in of_kind(objects, "PodDisruptionBudget"):
        chosen = [pod for pod in pods(objects) if selects(budget["spec"]["selector"], pod.labels)]
        if budget["spec"].get("maxUnavailable") == 0:
            yield f"PodDisruptionBudget {budget['metadata']['name']} stops every drain"
        if any(pod.is_ray for pod in chosen) and not isinstance(budget["spec"].get("minAvailable"), int):
            yield f"PodDisruptionBudget {budget['metadata']['name']}: Kubernetes knows no scale of a RayCluster"


def _ray_start(objects: Sequence[Object]) -> Iterator[str]:
    """Every parameter is one of `ray start`; workers have enough of a CPU limit for Ray to count."""
    known = {option.removeprefix("--") for parameter in ray_start.params for option in parameter.opts}
    for pod in pods(objects):
        if pod.is_ray:
            yield from (f"ray start has no --{name}" for name in {*pod.group["rayStartParams"]} - known)
            if pod.name != "headgroup" and "cpu" not in pod.container["resources"].get("limits", {}):
                yield f"{pod.name}: without a CPU limit Ray takes the node's"


def _durability(objects: Sequence[Object]) -> Iterator[str]:
    """The store is set up for the class that the services are told."""
    settings = settings_of(objects).store
    if "SEQMTP_STORE__DURABILITY" not in environment(objects):
        yield "no durability class is named"
    maps = {each["metadata"]["name"]: each.get("data") or {} for each in of_kind(objects, "ConfigMap")}
    (store,) = [each for each in of_kind(objects, "StatefulSet") if each["metadata"]["name"] == "store"]
    for each in of_kind(objects, "StatefulSet"):
        (conf,) = [v["configMap"]["name"] for v in each["spec"]["template"]["spec"]["volumes"] if v["name"] == "conf"]
        yield from _directives(maps[conf]["valkey.conf"])
        if each is store:
            said = dict(line.split(maxsplit=1) for line in lines(maps[conf]["valkey.conf"]))
    fsync = {"C1": "no", "C2": "always", "C3": "no"}[settings.durability]
    if said.get("appendonly") != "yes" or said.get("appendfsync") != fsync:
        yield f"class {settings.durability} needs another valkey.conf"
    if said.get("maxmemory-policy") != "noeviction":
        yield "the store may drop records"
    copies = settings.wait_replicas if settings.durability == "C3" else 0
    if store["spec"]["replicas"] != 1 + copies:
        yield f"{store['spec']['replicas']} store pods, the class needs {1 + copies}"
    (sources,) = [pod.container["envFrom"] for pod in pods(objects) if pod.labels.get(_NAME) == "store-0"]
    roles = maps[sources[0]["configMapRef"]["name"]]
    names = [f"store-{ordinal}" for ordinal in range(1 + copies)]
    if copies and (roles.get("PRIMARY") not in names or roles.get("PEERS") != " ".join(names)):
        yield f"roles {roles}: the pods are {names}"
    (service,) = [each for each in of_kind(objects, "Service") if each["metadata"]["name"] == "store"]
    if service["spec"]["selector"].get(_NAME) != (roles.get("PRIMARY") if copies else None):
        yield "Service store is not the primary"


_NAME = "statefulset.kubernetes.io/pod-name"


def lines(conf: str) -> list[str]:
    """Directives of a valkey.conf."""
    return [line for line in map(str.strip, conf.splitlines()) if line and not line.startswith("#")]


def _directives(conf: str) -> Iterator[str]:
    found = {line.split()[0] for line in lines(conf)}
    yield from (f"valkey.conf: {name} is no directive that is known here" for name in found - DIRECTIVES)
    if not {"dir", "appendonly", "appendfsync", "maxmemory", "maxmemory-policy"} <= found:
        yield "valkey.conf leaves out what records depend on"


def _store_user(objects: Sequence[Object]) -> str | None:
    (store,) = [each for each in of_kind(objects, "StatefulSet") if each["metadata"]["name"] == "store"]
    (container,) = store["spec"]["template"]["spec"]["containers"]
    return next((one.get("value") for one in container["env"] if one["name"] == "STORE_USER"), None)


def _rpc(objects: Sequence[Object]) -> Iterator[str]:
    """Replicas listen on their own pods' addresses, at the ports that the pods and the policies name."""
    rpc = settings_of(objects).rpc
    if rpc.host != "0.0.0.0":
        yield f"replicas listen on {rpc.host}"
    for pod in pods(objects):
        if pod.name in ROLES and pod.port(ROLES[pod.name]) != getattr(rpc, f"{ROLES[pod.name]}_port"):
            yield f"{pod.name}: port {pod.port(ROLES[pod.name])} is not the settings'"
        if pod.name == "frontend" and pod.port("serve") != serve_config(objects)["http_options"]["port"]:
            yield "frontend: Serve's HTTP port is another"
