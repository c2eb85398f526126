"""A master that knows tenants and nothing else: policies in a dict, behind a real channel and real gRPC."""

from __future__ import annotations

from concurrent import futures

import grpc

from kvstrata.proto import channel_pb2 as pb
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.control_pb2_grpc import MasterServicer, add_MasterServicer_to_server
from kvstrata.transfer.loops import Loops
from kvstrata.transfer.server import ChannelServer

FLOORS_MAX = 100 << 30


class FakeTenants(MasterServicer):  # type: ignore[misc]  # generated without types
    """``calls``: what was asked of it, by name. Floors beyond ``FLOORS_MAX`` in sum are refused."""

    def __init__(self) -> None:
        self.policies: dict[str, control.TenantPolicy] = {}
        self.fallback = control.TenantPolicy()
        self.denies = False
        self.rows: dict[str, control.TenantRow] = {}
        self.blocks: dict[str, int] = {}
        self.unreached: list[str] = []
        self.warnings: list[str] = []
        self.calls: list[str] = []
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2))
        add_MasterServicer_to_server(self, self._grpc)  # type: ignore[no-untyped-call]
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        hello = pb.HelloOk(role="master", cluster_id="c", grpc=f"127.0.0.1:{port}", software="fake")
        self._loops = Loops()
        self._channel = ChannelServer({}, lambda _: hello, lambda _: None, self._loops)
        self.address = self._channel.listen_tcp("127.0.0.1:0")

    def row(self, salt: str) -> control.TenantRow:
        row = control.TenantRow()
        row.CopyFrom(self.rows.get(salt, row))
        row.policy.CopyFrom(self.policies.get(salt, self.fallback))
        row.policy.salt, row.defined = salt, salt in self.policies
        return row

    def ListTenants(self, request: control.TenantQuery, context: grpc.ServicerContext) -> control.TenantList:
        self.calls.append("list")
        salts = list(request.salts) or sorted({*self.policies, *self.rows})
        rows = [self.row(salt) for salt in salts]
        return control.TenantList(tenants=rows, fallback=self.fallback, fallback_denies=self.denies, dram_bytes=1 << 40)

    def SetTenant(self, request: control.TenantSet, context: grpc.ServicerContext) -> control.TenantChanged:
        self.calls.append(f"set {'default' if request.is_default else request.policy.salt}")
        policy, salt = request.policy, request.policy.salt
        others = sum(p.dram_floor for s, p in self.policies.items() if s != salt)
        if others + policy.dram_floor > FLOORS_MAX:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"floors of {others + policy.dram_floor} do not fit")
        before = self.row(salt)
        after = control.TenantRow(policy=policy, defined=True)
        if not request.dry_run:
            if request.is_default:
                self.fallback, self.denies = policy, request.deny
            else:
                self.policies[salt] = policy
        return control.TenantChanged(before=before, after=after, warnings=self.warnings)

    def RemoveTenant(self, request: control.TenantRemove, context: grpc.ServicerContext) -> control.TenantChanged:
        self.calls.append(f"remove {request.salt}")
        before = self.row(request.salt)
        dropped = None
        if request.drop_blocks:
            unreached = [] if request.dry_run else self.unreached
            dropped = control.Dropped(blocks=self.blocks.get(request.salt, 0), unreached=unreached)
        if not request.dry_run:
            self.policies.pop(request.salt, None)
            if request.drop_blocks:
                self.blocks.pop(request.salt, None)
        return control.TenantChanged(before=before, after=self.row(request.salt), dropped=dropped)

    def stop(self) -> None:
        self._grpc.stop(None).wait(5)
        self._channel.stop(0.1)
        self._loops.stop()
