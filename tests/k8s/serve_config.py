"""`serveConfigV2` against what reads it: Ray's own schema, our settings tree, the application, the worker groups.

Ray's schema lets unknown keys pass; here they are faults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, get_args
from unittest import mock

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from seqmtp_serve.errors import InvalidField
from services.app import application
from services.core_config import engine_config, scheduler_config
from services.settings import Settings, from_json
from services.settings_sources import load
from tests.k8s.rendered import Object, Pod, of_kind, pods, ray_service

IN_CODE = {"num_replicas": 1}  # what services/app.py says unless the configuration does


def serve_config(objects: Sequence[Object]) -> dict[str, Any]:
    """The document in the RayService."""
    return yaml.safe_load(ray_service(objects)["serveConfigV2"])  # type: ignore[no-any-return]


def settings_of(objects: Sequence[Object]) -> Settings:
    """The tree that `services.app.build` makes of the arguments and of the pods' environment. Raises InvalidField."""
    (app,) = serve_config(objects)["applications"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEQMTP_")}
    with mock.patch.dict(os.environ, {**clean, **environment(objects)}, clear=True):
        return load(app["args"])


def environment(objects: Sequence[Object]) -> dict[str, str]:
    """What every Ray pod has from its ConfigMaps."""
    maps = {each["metadata"]["name"]: each.get("data", {}) for each in of_kind(objects, "ConfigMap")}
    found = [
        {
            name: value
            for source in pod.container["envFrom"]
            for name, value in maps.get(source["configMapRef"]["name"], {}).items()
        }
        for pod in pods(objects)
        if pod.is_ray
    ]
    assert all(each == found[0] for each in found), "the pod in which Serve builds the application may be any"
    return found[0]


def serve_faults(objects: Sequence[Object]) -> list[str]:
    """A sentence for each fault."""
    try:
        config = serve_config(objects)
        ServeDeploySchema.model_validate(config)
        settings = settings_of(objects)
        engine_config(settings), scheduler_config(settings)
    except (KeyError, AttributeError, yaml.YAMLError, ValidationError, InvalidField) as error:
        return [f"serveConfigV2: {type(error).__name__}: {error}"]
    faults = [*unknown_keys(config, ServeDeploySchema, "serveConfigV2"), *_unknown_variables(environment(objects))]
    (app,) = config["applications"]
    if app["import_path"] != "services.app:build":
        faults.append(f"import_path {app['import_path']}")
    deployments = {each["name"]: {**IN_CODE, **each} for each in app["deployments"]}
    if set(deployments) != deployed(settings):
        faults.append(f"deployments {sorted(deployments)}, the application has {sorted(deployed(settings))}")
    bundles = len(deployments["Target"].get("placement_group_bundles", [None]))
    if bundles != settings.engine.target_ranks:
        faults.append(f"{bundles} bundles for {settings.engine.target_ranks} ranks")
    faults += [fault for each in app["deployments"] for fault in _policy_faults(each)]
    return [*faults, *_placement_faults(deployments.values(), objects)]


def _policy_faults(deployment: Mapping[str, Any]) -> Iterator[str]:
    """Serve imports a policy when it is first asked: too late to learn that there is none."""
    name = deployment.get("autoscaling_config", {}).get("policy", {}).get("policy_function")
    if name is not None:
        module, _, word = name.partition(":")
        try:
            getattr(import_module(module), word)(**deployment["autoscaling_config"]["policy"].get("policy_kwargs", {}))
        except (ImportError, AttributeError, TypeError) as error:
            yield f"{deployment['name']}: no policy {name}: {error}"


def deployed(settings: Settings) -> set[str]:
    """Names of the application's deployments."""
    return _deployed(settings.to_json())


@lru_cache
def _deployed(settings: str) -> set[str]:
    ingress = application(from_json(settings))._bound_deployment
    return {ingress.name, *(each._bound_deployment.name for each in ingress.init_args)}


def unknown_keys(value: Any, model: Any, path: str) -> Iterator[str]:
    """Keys that no model on the way down knows. `args` is the settings tree's, which refuses its own."""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from unknown_keys(each, model, f"{path}[{index}]")
    models = _models(model)
    if not isinstance(value, Mapping) or not models:
        return
    fields = {name: field for each in models for name, field in each.model_fields.items()}
    for key, inner in value.items():
        if key not in fields:
            yield f"{path} has the unknown key {key}"
        elif key == "autoscaling_config":
            yield from unknown_keys(inner, AutoscalingConfig, f"{path}.{key}")
        elif key != "args":
            yield from unknown_keys(inner, fields[key].annotation, f"{path}.{key}")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models(each)]


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """The settings tree looks for the names it knows and passes over all others: so does Ray."""
    import ray._common.usage.usage_constants as usage
    import ray.serve._private.constants as serve

    for name in environment:
        node: Any = Settings
        if name.startswith("SEQMTP_"):
            for word in name.removeprefix("SEQMTP_").lower().split("__"):
                field = getattr(node, "model_fields", {}).get(word)
                node = None if field is None else field.annotation
            if node is None:
                yield f"no setting is called {name}"
        elif not hasattr(serve, name) and name != usage.USAGE_STATS_ENABLED_ENV_VAR:
            yield f"Ray reads no variable {name}"


def _placement_faults(deployments: Any, objects: Sequence[Object]) -> Iterator[str]:
    groups = {pod.name: pod for pod in pods(objects) if pod.is_ray}
    used: dict[str, list[Mapping[str, Any]]] = {}
    for each in deployments:
        name, selector = each["name"], _selector(each)
        fits = [pod.name for pod in groups.values() if selector and _has(pod, selector)]
        if len(fits) != 1:
            yield f"{name} selects the groups {fits}: not one"
            continue
        used.setdefault(fits[0], []).append(each)
    for group in {*groups} - {"headgroup"} - {*used}:
        yield f"nothing is placed on the group {group}"
    for group, placed in used.items():
        yield from _capacity_faults(groups[group], placed)


def _capacity_faults(pod: Pod, placed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    limits, hosts = pod.container["resources"]["limits"], pod.group.get("numOfHosts", 1)
    for resource, limit in (("CPU", float(limits["cpu"])), ("GPU", float(limits.get("nvidia.com/gpu", 0)))):
        wanted = sum(_wants(each, resource) for each in placed)
        if wanted > limit * hosts or (resource == "GPU" and wanted != limit * hosts):
            names = [each["name"] for each in placed]
            yield f"one replica of each of {names} wants {wanted} {resource} of {limit * hosts}"
    for each in placed:
        scaling = each.get("autoscaling_config")
        least, most = (scaling["min_replicas"], scaling["max_replicas"]) if scaling else (each["num_replicas"],) * 2
        if not pod.group["minReplicas"] <= pod.group["replicas"] <= pod.group["maxReplicas"]:
            yield f"group {pod.name}: replicas out of bounds"
        if most > pod.group["maxReplicas"] or least > pod.group["replicas"]:
            yield f"{each['name']} wants {least} to {most} pods of {pod.name}"
        if "placement_group_bundles" not in each and each.get("max_replicas_per_node") != 1:
            yield f"{each['name']}: two replicas on one pod would want one port"


def _selector(deployment: Mapping[str, Any]) -> Mapping[str, str]:
    if "placement_group_bundles" in deployment:
        (selector,) = deployment["placement_group_bundle_label_selector"]
        return selector  # type: ignore[no-any-return]
    return deployment["ray_actor_options"].get("label_selector", {})  # type: ignore[no-any-return]


def _has(pod: Pod, selector: Mapping[str, str]) -> bool:
    labels = pod.group.get("labels", {})
    return all(labels.get(key) == value for key, value in selector.items())


def _wants(deployment: Mapping[str, Any], resource: str) -> float:
    if bundles := deployment.get("placement_group_bundles"):
        return float(sum(bundle.get(resource, 0) for bundle in bundles))
    return float(deployment["ray_actor_options"].get({"CPU": "num_cpus", "GPU": "num_gpus"}[resource], 0))
