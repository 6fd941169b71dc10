"""Whether every file that a program is told of is mounted, under that name, where it is told to look."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import parse_qsl, urlsplit

from tests.k8s.rendered import Object, Pod, of_kind, pods
from tests.k8s.serve_config import environment, settings_of

ISSUED_KEYS = ("tls.crt", "tls.key", "ca.crt")  # what cert-manager puts into its Secrets
SOCKET = re.compile(r"unixsocket \$run/([\w.]+)")


def file_faults(objects: Sequence[Object]) -> Iterator[str]:
    """Files of the settings and of the environment in every worker; script, socket and data folder in the stores."""
    told = [*_settings_files(objects), *(value for value in environment(objects).values() if value.startswith("/"))]
    for pod in pods(objects):
        mounted = _mounted(objects, pod)
        if not pod.is_ray:
            yield from _store_faults(objects, pod, mounted)
        elif pod.name != "headgroup":
            yield from (f"{pod.name} is told of {file}: no volume has it" for file in told if file not in mounted)


def _settings_files(objects: Sequence[Object]) -> Iterator[str]:
    settings = settings_of(objects)
    yield from map(str, filter(None, (settings.store.password_file, settings.gateway.api_key_file)))
    query = dict(parse_qsl(urlsplit(settings.store.url or "").query))
    yield from (value for name, value in query.items() if name.startswith("ssl_") and value.startswith("/"))


def _mounted(objects: Sequence[Object], pod: Pod) -> Mapping[str, str]:
    """Path -> text, of the files that Secrets and ConfigMaps bring; a Secret's text is nobody's to know."""
    maps = {each["metadata"]["name"]: each.get("data") or {} for each in of_kind(objects, "ConfigMap")}
    places = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
    found: dict[str, str] = {}
    for volume in pod.spec["volumes"]:
        if "secret" in volume:
            items = volume["secret"].get("items", [{"path": key} for key in ISSUED_KEYS])
            files = {item["path"]: "" for item in items}
        elif "configMap" in volume:
            files = maps[volume["configMap"]["name"]]
        else:
            continue
        found |= {f"{places[volume['name']]}/{name}": text for name, text in files.items()}
    return found


def _store_faults(objects: Sequence[Object], pod: Pod, mounted: Mapping[str, str]) -> Iterator[str]:
    script = pod.container["command"][-1]
    if script not in mounted:
        yield f"{pod.name} starts {script}: no volume has it"
        return
    places = {mount["name"]: mount["mountPath"] for mount in pod.container["volumeMounts"]}
    (socket,) = SOCKET.findall(mounted[script])
    for kind in ("startupProbe", "readinessProbe"):
        words = pod.container[kind]["exec"]["command"][-1].split()
        if words[words.index("-s") + 1] != f"{places['run']}/{socket}":
            yield f"{pod.name}: {kind} asks another socket than {socket}"
    (folder,) = re.findall(r"^dir (\S+)$", mounted["/etc/store/conf/valkey.conf"], re.M)
    if places["data"] != folder:
        yield f"{pod.name} keeps its data in {folder}: its volume is at {places['data']}"
    for one in pod.container["env"]:
        field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "metadata.name")
        if field != "metadata.name":
            yield f"{pod.name}: {one['name']} is {field}"
