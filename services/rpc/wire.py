"""The generated messages and stubs, under short names, built first if they are missing or old.

    from services.rpc.wire import common, target, target_rpc
    plan = target.StepPlan(step_id=1)
    stub = target_rpc.TargetStub(channel)

Nothing else imports `services.rpc.pb`.
"""

# ruff: noqa: E402  (the guard must run before the generated modules are imported)
from services.rpc import build

build.ensure()

from services.rpc.pb.seqmtp.v1 import common_pb2 as common
from services.rpc.pb.seqmtp.v1 import coordinator_pb2 as coordinator
from services.rpc.pb.seqmtp.v1 import coordinator_pb2_grpc as coordinator_rpc
from services.rpc.pb.seqmtp.v1 import gang_pb2 as gang
from services.rpc.pb.seqmtp.v1 import gang_pb2_grpc as gang_rpc
from services.rpc.pb.seqmtp.v1 import proposer_pb2 as proposer
from services.rpc.pb.seqmtp.v1 import proposer_pb2_grpc as proposer_rpc
from services.rpc.pb.seqmtp.v1 import target_pb2 as target
from services.rpc.pb.seqmtp.v1 import target_pb2_grpc as target_rpc

__all__ = [
    "common",
    "coordinator",
    "coordinator_rpc",
    "gang",
    "gang_rpc",
    "proposer",
    "proposer_rpc",
    "target",
    "target_rpc",
]
