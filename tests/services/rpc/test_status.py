"""The error table is complete, and a typed error survives a real call."""

import grpc
import pytest

from seqmtp_serve import errors
from services.rpc import channel, status
from services.rpc.wire import coordinator, coordinator_rpc

CLASSES = list(status.error_classes())


def test_every_error_has_a_row_of_its_own():
    assert set(status.TABLE) == set(CLASSES)


def test_codes_name_one_class_each():
    assert len({cls.code for cls in CLASSES}) == len(CLASSES) - 1  # InternalError shares the root's "internal_error"
    assert errors.InternalError.code == errors.SeqMTPError.code


def test_what_a_retry_can_help_is_503_or_the_callers_own_429():
    for cls in CLASSES:
        assert (status.TABLE[cls][1] in (429, 503)) == cls.retryable, cls


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not errors.SeqMTPError])
def test_an_error_survives_as_a_message(cls):
    again = status.from_message(status.to_message(cls("what to do about it")))
    assert type(again) is cls
    assert str(again).startswith("what to do about it")


def test_an_unknown_code_is_an_internal_error_that_names_it():
    again = status.from_message(status.common.Error(code="from_the_future", message="hm"))
    assert type(again) is errors.InternalError
    assert "from_the_future" in str(again)


def test_a_private_refinement_travels_as_its_parent():
    class Refined(errors.InternalError):
        pass

    assert Refined not in status.error_classes()
    assert status.http_status(Refined("x")) == status.http_status(errors.InternalError("x"))
    assert type(status.from_message(status.to_message(Refined("x")))) is errors.InternalError


async def test_an_error_survives_a_call():
    class Refuses(coordinator_rpc.CoordinatorServicer):
        async def Cancel(self, request, context):
            await status.abort(context, errors.InvalidField("temperature must be at most 2", param="temperature"))

    server = channel.new_server()
    coordinator_rpc.add_CoordinatorServicer_to_server(Refuses(), server)
    address = channel.bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with channel.connect(address) as connection:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await coordinator_rpc.CoordinatorStub(connection).Cancel(coordinator.CancelRequest())
            error = status.from_call(caught.value)
            assert type(error) is errors.InvalidField
            assert (str(error), error.param) == ("temperature must be at most 2", "temperature")
    finally:
        await server.stop(None)


async def test_a_peer_that_is_not_there_is_unavailable():
    async with channel.connect("127.0.0.1:1") as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator_rpc.CoordinatorStub(connection).Cancel(coordinator.CancelRequest(), timeout=30)
    assert type(status.from_call(caught.value)) is errors.Unavailable
