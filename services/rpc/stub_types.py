"""Types of the generated gRPC stubs and servicers, which protoc leaves without: a .pyi beside each `_pb2_grpc.py`.

They say what `grpc.aio` takes and gives: each service here is asked and answered in an event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto

_HEAD = """\
from collections.abc import AsyncIterator, Awaitable

from grpc import aio

"""


def stub_types(descriptors: bytes) -> dict[str, str]:
    """The text of each .pyi by its path, for the files that declare a service; from protoc's FileDescriptorSet."""
    protos = FileDescriptorSet.FromString(descriptors)
    homes = {
        f".{proto.package}.{message.name}": f"{_module(proto).rpartition('.')[2]}.{message.name}"
        for proto in protos.file
        for message in proto.message_type
    }
    modules = sorted(_module(proto) for proto in protos.file)
    imports = "".join(f"from {package} import {name}\n" for package, _, name in (m.rpartition(".") for m in modules))
    return {
        f"{_module(proto).replace('.', '/')}_grpc.pyi": _HEAD + imports + "".join(_services(proto, homes))
        for proto in protos.file
        if proto.service
    }


def _module(proto: FileDescriptorProto) -> str:
    return f"{proto.name.removesuffix('.proto').replace('/', '.')}_pb2"


def _services(proto: FileDescriptorProto, homes: dict[str, str]) -> Iterator[str]:
    for service in proto.service:
        methods = [(method, homes[method.input_type], homes[method.output_type]) for method in service.method]
        stub = ["def __init__(self, channel: aio.Channel) -> None: ..."]
        yield _class(f"{service.name}Stub", [*stub, *(_callable(*method) for method in methods)])
        yield _class(f"{service.name}Servicer", (_handler(*method) for method in methods))
        given = f"servicer: {service.name}Servicer, server: aio.Server"
        yield f"\ndef add_{service.name}Servicer_to_server({given}) -> None: ...\n"


def _class(name: str, members: Iterable[str]) -> str:
    return f"\nclass {name}:\n" + "".join(f"    {member}\n" for member in members)


def _callable(method: MethodDescriptorProto, request: str, response: str) -> str:
    """What calls the method: an attribute of the stub."""
    kind = {True: "Stream", False: "Unary"}
    name = f"{kind[method.client_streaming]}{kind[method.server_streaming]}MultiCallable"
    return f"{method.name}: aio.{name}[{request}, {response}]"


def _handler(method: MethodDescriptorProto, request: str, response: str) -> str:
    """What answers the method. One that streams yields its messages, or is a coroutine that writes them."""
    given = f"AsyncIterator[{request}]" if method.client_streaming else request
    answer = f"AsyncIterator[{response}] | Awaitable[None]" if method.server_streaming else response
    head = "def" if method.server_streaming else "async def"
    context = f"aio.ServicerContext[{request}, {response}]"
    return f"{head} {method.name}(self, request: {given}, context: {context}, /) -> {answer}: ..."
