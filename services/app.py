"""The Ray Serve application: every service as a deployment. The only file that knows them all.

Ray places, starts, watches and restarts the replicas. No token passes through a Serve handle: the services find each
other in the registry and talk gRPC, exactly as plain processes do. On a cluster, name this as `import_path:
services.app:build` with the settings tree as `args` (`k8s/`, docs/deploy.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from seqmtp_serve.errors import CheckpointError, SeqMTPError
from services.accounts import AccountBook
from services.core_config import engine_config, proposer_config
from services.entry import set_up_process
from services.node_address import on_node
from services.rpc.serving import store_url
from services.scaling import LevelsReader
from services.settings import Settings, from_json
from services.settings_sources import load
from services.store.connection import connect

# What fails at once (a checkpoint that cannot be served) fails the deployment, with its reason; see Worker.__init__.
FAILS_WITHIN_S = 3.0
GOODBYE_S = 5.0  # past its drain a replica gets so long to end
CPUS = {"target": 0.4, "proposer": 0.2, "coordinator": 0.2, "gateway": 0.1}  # a share to place by, not a limit
MAX_STREAMS = 1024  # requests one gateway replica holds open


class Worker:
    """One service's `run(settings, stop)` in a replica, on the replica's own event loop. Nobody calls it by handle."""

    async def __init__(self, role: str, package: str, settings: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the service. Raises what it raises in its first moments, so that the deployment says why it fails."""
        node = get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray gives it no types
        tree = on_node(from_json(settings), node)
        set_up_process(role, tree)
        self._optional, self._stop_within_s = role == "proposer", tree.drain_s + GOODBYE_S
        self._stop, self._levels = asyncio.Event(), _levels(tree)
        run = import_module(f"{package}.{role}.main").run
        if role == "target" and tree.engine.target_ranks > 1:
            from services.target.rank_actors import rank_actors

            run = partial(run, start_ranks=rank_actors)
        self._running: asyncio.Task[None] = asyncio.create_task(run(tree, self._stop))
        await asyncio.wait({self._running}, timeout=FAILS_WITHIN_S)
        self.check_health()

    def check_health(self) -> None:
        """Raises what ended the service; Serve then replaces the replica. Costs nothing and waits for nothing."""
        if not self._running.done() or self._stop.is_set():
            return
        error = self._running.exception()
        if isinstance(error, CheckpointError) and self._optional:
            return  # there is no MTP module to serve, and a new start would find none: the target goes on at depth 0
        if isinstance(error, SeqMTPError):
            raise RuntimeError(f"{error.code}: {error}") from error
        raise RuntimeError("the service ended by itself") from error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's call, now and then, when the deployment scales: what its policy needs (`services/scaling.py`)."""
        return await self._levels.read()

    async def __del__(self) -> None:
        """Serve's call before it ends the replica: the service drains, as a process does that gets SIGTERM."""
        self._stop.set()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._running, self._stop_within_s)


def _levels(settings: Settings) -> LevelsReader:
    """Reads what every process counts. It opens nothing until it is asked."""
    store = settings.store
    password, timeout_s = store.resolved_password(), store.socket_timeout_s
    return LevelsReader(AccountBook(connect(store_url(settings), password=password, socket_timeout_s=timeout_s)))


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for a settings tree (what it leaves out comes from the environment and the defaults).

    Raises InvalidField for settings that do not fit.
    """
    return application(load(args))


def application(settings: Settings, package: str = "services") -> serve.Application:
    """Target, proposer (if it has a process) and coordinator, and the gateway as the ingress over them."""
    roles = ["target", "coordinator"]
    if settings.wants_proposer_process:
        roles.insert(1, "proposer")
    beside = [_worker(role, package, settings) for role in roles]
    gateway: serve.Application = _gateway(package, settings).bind(*beside)
    return gateway


def _worker(role: str, package: str, settings: Settings) -> serve.Application:
    num_ranks = settings.engine.target_ranks if role == "target" else 1
    options: dict[str, Any] = {}
    num_gpus = 1 if _device(role, settings).startswith("cuda") else 0  # Ray then shows a rank its own GPU alone
    if num_ranks > 1:  # the replica is rank 0, in the first bundle; it puts an actor of its own in each other one
        bundle = {"CPU": CPUS[role] / num_ranks} | ({"GPU": num_gpus} if num_gpus else {})
        options = {"placement_group_bundles": [bundle] * num_ranks, "placement_group_strategy": "PACK"}
    cpus = CPUS[role] / num_ranks
    deployment = _deployment(Worker, role, cpus, settings.drain_s, num_gpus=num_gpus, **options)
    worker: serve.Application = deployment.bind(role, package, settings.to_json())
    return worker


def _device(role: str, settings: Settings) -> str:
    computes = {"target": engine_config, "proposer": proposer_config}
    return computes[role](settings).device if role in computes else "cpu"


def _gateway(package: str, settings: Settings) -> Any:
    text = settings.to_json()

    def build_asgi() -> FastAPI:
        tree = from_json(text)
        set_up_process("gateway", tree)
        app: FastAPI = import_module(f"{package}.gateway.main").build_app(tree)
        return app

    class Gateway:
        """The ingress. It is given the other deployments so that Serve starts them; it calls none of them."""

        def __init__(self, *beside: DeploymentHandle[Any]) -> None:
            self.beside = beside

    ingress, cpus = serve.ingress(build_asgi)(Gateway), CPUS["gateway"]
    return _deployment(ingress, "gateway", cpus, settings.drain_s, max_ongoing_requests=MAX_STREAMS)


def _deployment(replica: Any, role: str, cpus: float, drain_s: float, num_gpus: int = 0, **options: Any) -> Any:
    return serve.deployment(
        name=role.title(),
        num_replicas=1,
        ray_actor_options={"num_cpus": cpus} | ({"num_gpus": num_gpus} if num_gpus else {}),
        health_check_period_s=1,
        health_check_timeout_s=10,  # a replica that loads weights on a busy machine is slow, not dead
        graceful_shutdown_timeout_s=drain_s + GOODBYE_S,
        graceful_shutdown_wait_loop_s=0.2,
        **options,
    )(replica)
