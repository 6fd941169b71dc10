"""The gateway as an ASGI application: under uvicorn, or as a Ray Serve ingress. Creating it does no IO."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CollectorRegistry

from seqmtp_serve.speculation.grammar import GrammarCompiler
from services import telemetry
from services.accounts import AccountBook
from services.gateway.board import StatusBoard
from services.gateway.coordinators import CoordinatorClient
from services.gateway.drain import Drain, NothingNew
from services.gateway.gateway import Gateway
from services.gateway.guard import ApiKey, BodyLimit, RequestIds
from services.gateway.head import HeadAsGet
from services.gateway.keys import KeyRing
from services.gateway.limits import OwnLimits, SharedLimits
from services.gateway.measure import Measures
from services.gateway.metrics_export import exporting_metrics
from services.gateway.openapi import without_422
from services.gateway.problems import install_handlers
from services.gateway.reasoning import CLOSE
from services.gateway.routes_generate import generation_routes
from services.gateway.routes_ledger import ledger_routes
from services.gateway.routes_models import model_routes
from services.gateway.routes_responses import response_routes
from services.gateway.routes_resume import resume_routes
from services.gateway.routes_service import service_routes
from services.gateway.routes_tokens import token_routes
from services.gateway.scrape import Scrape
from services.gateway.spans import RequestSpans
from services.gateway.text_model import TextModel
from services.gateway.turns import Turns
from services.rpc.identity import new_id
from services.settings import Settings


def create_app(
    settings: Settings,
    coordinator: CoordinatorClient,
    text: TextModel,
    accounts: AccountBook | None = None,
    limits: SharedLimits | None = None,
    measures: Measures | None = None,
) -> FastAPI:
    """Build the application. Its shutdown closes `coordinator`. Without `accounts` /metrics shows only this gateway and
    the coordinators that answer; without `limits` keys are held to theirs at this gateway alone. `measures` are what
    `coordinator` counts into, if it does. `app.state.drain` is its `Drain`.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            with telemetry.exporting("gateway", gateway_id):
                async with (
                    scrape.kept(),
                    exporting_metrics(scrape, gateway_id, accounts),
                    contextlib.nullcontext() if limits is None else limits.kept(),
                ):
                    yield
        finally:
            await board.close()
            await coordinator.close()

    keys = KeyRing(settings.gateway.plain_api_key(), settings.gateway.api_key_file)
    board = StatusBoard(coordinator, settings.model.served_name)
    measures = measures or Measures(CollectorRegistry())
    gateway_id = new_id("gateway")
    scrape = Scrape(board, measures.registry, gateway_id, accounts)
    gateway = Gateway(
        coordinator=coordinator,
        text=text,
        board=board,
        drain=Drain(),
        measures=measures,
        grammars=GrammarCompiler(lambda: text.tokenizer, text.vocab_size),
        version=release(),
        reasons=reasons(settings.gateway.reasoning_parser, text),
    )
    app = FastAPI(
        title="SeqMTP Serve",
        version=gateway.version,
        description="OpenAI-compatible generation; every token is verified and committed before it is streamed.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
    )
    app.include_router(generation_routes(gateway))
    app.include_router(resume_routes(gateway))
    app.include_router(ledger_routes(gateway))
    app.include_router(response_routes(gateway))
    app.include_router(model_routes(gateway, int(time.time())))
    app.include_router(token_routes(gateway))
    app.include_router(service_routes(gateway, scrape))
    install_handlers(app)
    without_422(app)
    app.state.drain = gateway.drain
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimit)
    app.add_middleware(NothingNew, drain=gateway.drain)
    app.add_middleware(ApiKey, keys=keys, limits=limits or OwnLimits())
    if settings.gateway.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.gateway.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    if telemetry.is_configured():
        app.add_middleware(RequestSpans)
    app.add_middleware(RequestIds)
    app.add_middleware(Turns)
    return app


def reasons(parser: str, text: TextModel) -> bool:
    """Whether thoughts are told apart from answers, by the setting and the model's template."""
    return parser == "deepseek_r1" or (parser == "auto" and text.template is not None and CLOSE in text.template.source)


def release() -> str:
    """The installed version, or a word for a source tree."""
    try:
        return installed_version("seqmtp-serve")
    except PackageNotFoundError:
        return "source"
