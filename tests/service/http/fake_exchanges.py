"""Requests over HTTP without a connection."""

from types import SimpleNamespace
from typing import Any

from normserve.admission.client_identity import ClientIdentity
from normserve.admission.permits import AdmissionBudget, Permit
from normserve.engine.progress import CompletionTracker
from normserve.http.http_exchange import HttpExchange
from normserve.http.transport import IncomingBody
from normserve.http.transport.asgi_adapter import AsgiResponseSender
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.memory_admission import MemoryAdmission
from normserve.requests.request_lifecycle import RequestServices

from tests.service.engine.fake_engine import Scene


def make_exchange(limits: AdmissionBudget, reception: Any, address: str = "127.0.0.1") -> Any:
    """Return as much of a request as its body takes; `permit` is None until it has one."""
    caller = ClientIdentity(address)
    exchange = SimpleNamespace(incoming_body=reception, permit=None)

    def acquire_permit(nbytes: int) -> Permit:
        exchange.permit = limits.acquire(nbytes, caller.tenant_name, caller.max_inflight_bytes)
        return exchange.permit

    exchange.acquire_permit = acquire_permit
    return exchange


class ExchangeScene:
    """A request without a body, and the engine that computes it."""

    def __init__(self, *, max_bytes: int = 2**30, timeout_ms: float = 20_000) -> None:
        self.scene = Scene()
        self.limits, self.progress = AdmissionBudget(max_requests=4, max_bytes=2**30), CompletionTracker()
        engine = self.scene.engine
        admission = MemoryAdmission(engine, max_bytes)
        services = RequestServices(engine, self.limits, admission, self.progress, self.scene.metrics, timeout_ms)
        reception = IncomingBody(0, bytearray)
        reception.mark_complete()
        scope = {"path": "/", "state": {"reception": reception, "sending": AsgiResponseSender(None)}}
        record = RequestRecord(stage_seconds={"recv": 0.0})
        self.exchange = HttpExchange(
            services, "id", {}, ClientIdentity("somebody"), record, scope, lambda scope: "/"
        )

    async def start(self) -> None:
        await self.scene.engine.start()
        self.scene.engine.accept_jobs()
