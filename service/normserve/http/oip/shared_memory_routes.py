"""`/v2/systemsharedmemory` and `/v2/cudasharedmemory`: register, unregister and list regions."""

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import Meta

from normserve.errors import MalformedPayloadError, TooLargeError
from normserve.http.body_reader import BodyReader
from normserve.http.direct_routes import DirectRoute
from normserve.http.http_exchange import HttpExchange
from normserve.http.oip.inference_request import strip_byte_order_mark
from normserve.http.oip.regions.device_regions import DeviceRegion, DeviceRegionOpener
from normserve.http.oip.regions.file_regions import FileRegion
from normserve.http.oip.regions.region_registry import RegionRegistry, require_region_name
from normserve.memory.ipc_allocations import HANDLE_BYTES
from normserve.memory.thread_allocation import make_unretained_on_thread

TRANSPORT_SYSTEM, TRANSPORT_CUDA = "oip_shm", "oip_cuda"
"""Metric labels of requests that use or register regions of either kind."""

_OP = "regions"
_MAX_BODY_BYTES = 64 * 1024

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _SystemRegistration(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON body of a request that registers a region of system shared memory.

    Attributes:
        key: the name of the shared memory file.
        offset: offset of the region in the file, in bytes.
    """

    key: str
    byte_size: _Size
    offset: _Size = 0


class _IpcHandle(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The IPC handle of a CUDA allocation, in base64."""

    b64: str


class _CudaRegistration(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON body of a request that registers CUDA shared memory."""

    raw_handle: _IpcHandle
    device_id: _Size
    byte_size: _Size


_T = TypeVar("_T")

_SYSTEM, _CUDA = msgspec.json.Decoder(_SystemRegistration), msgspec.json.Decoder(_CudaRegistration)


@dataclass(frozen=True, slots=True)
class SharedMemoryRoutes:
    """The handlers that register, unregister and list regions of system and CUDA shared memory."""

    regions: RegionRegistry
    device_regions: DeviceRegionOpener
    body_reader: BodyReader

    def make_router(self) -> APIRouter:
        """Make the routes to register, list and unregister regions, for both kinds of shared memory."""
        router = APIRouter(tags=["open inference protocol"], route_class=DirectRoute)
        for kind, register, status, unregister in (
            ("system", self.register_system, self.list_system, self.unregister_system),
            ("cuda", self.register_cuda, self.list_cuda, self.unregister_cuda),
        ):
            root = f"/v2/{kind}sharedmemory"
            each = f"{root}/region/{{region}}"
            what = f"of {kind} shared memory"
            router.add_api_route(
                f"{each}/register", register, methods=["POST"], summary=f"register a region {what}"
            )
            for path in (f"{root}/status", f"{each}/status"):
                router.add_api_route(path, status, methods=["GET", "HEAD"], summary=f"the regions {what}")
            for path in (f"{root}/unregister", f"{each}/unregister"):
                router.add_api_route(path, unregister, methods=["POST"], summary=f"forget regions {what}")
        return router

    async def register_system(self, request: Request) -> Response:
        """Open a file of shared memory and give a region of it a name."""
        exchange, name = _label_request(request, TRANSPORT_SYSTEM)
        registration: _SystemRegistration = await self._read_registration(exchange, _SYSTEM)
        assert name is not None
        # The search of the process's mappings takes a millisecond.
        region = await make_unretained_on_thread(
            self.regions.open_file_region, name, registration.key, registration.offset, registration.byte_size
        )
        self.regions.register_region(exchange.client_identity.key, name, region)
        return Response()

    async def register_cuda(self, request: Request) -> Response:
        """Open device memory that the client has allocated and give it a name."""
        exchange, name = _label_request(request, TRANSPORT_CUDA)
        registration: _CudaRegistration = await self._read_registration(exchange, _CUDA)
        assert name is not None
        require_region_name(name)
        handle = _decode_handle(registration.raw_handle.b64)
        region = await self.device_regions.open_region(
            exchange.client_identity, handle, registration.device_id, registration.byte_size
        )
        self.regions.register_region(exchange.client_identity.key, name, region)
        return Response()

    async def list_system(self, request: Request) -> Response:
        """The registered regions of system shared memory."""
        exchange, name = _label_request(request, TRANSPORT_SYSTEM)
        return JSONResponse(self.regions.describe_regions(exchange.client_identity.key, FileRegion.kind, name))

    async def list_cuda(self, request: Request) -> Response:
        """The registered regions of CUDA memory."""
        exchange, name = _label_request(request, TRANSPORT_CUDA)
        return JSONResponse(self.regions.describe_regions(exchange.client_identity.key, DeviceRegion.kind, name))

    async def unregister_system(self, request: Request) -> Response:
        """Unregister a region, or all; requests that already use them are not affected."""
        exchange, name = _label_request(request, TRANSPORT_SYSTEM)
        self.regions.unregister_regions(exchange.client_identity.key, FileRegion.kind, name)
        return Response()

    async def unregister_cuda(self, request: Request) -> Response:
        """The same for CUDA memory, which is unmapped once no request uses it."""
        exchange, name = _label_request(request, TRANSPORT_CUDA)
        self.regions.unregister_regions(exchange.client_identity.key, DeviceRegion.kind, name)
        return Response()

    async def _read_registration(self, exchange: HttpExchange, decoder: "msgspec.json.Decoder[_T]") -> _T:
        """Receive the body of a registration and decode its JSON.

        Raises:
            TooLargeError: the body is too long.
            MalformedPayloadError: the JSON is invalid.
        """
        _require_body_limit(exchange.incoming_body.content_length or 0)
        body = await self.body_reader.admit_and_receive_body(exchange)
        exchange.mark_in_progress()
        _require_body_limit(len(body))
        try:
            return decoder.decode(strip_byte_order_mark(body))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise MalformedPayloadError(f"the region's JSON cannot be read: {reason}") from None


def _label_request(request: Request, transport: str) -> tuple[HttpExchange, str | None]:
    """Set the request's metric labels; return its exchange and the region's name in the path.

    The name is None if the path has none, for a request about all regions.
    """
    exchange: HttpExchange = request.scope["state"]["exchange"]
    exchange.record.op, exchange.record.transport = _OP, transport
    return exchange, request.path_params.get("region")


def _require_body_limit(nbytes: int) -> None:
    if nbytes > _MAX_BODY_BYTES:
        raise TooLargeError(f"a region's registration must be at most {_MAX_BODY_BYTES} bytes, got {nbytes}")


def _decode_handle(b64: str) -> bytes:
    """Decode a CUDA IPC handle from base64.

    Raises:
        MalformedPayloadError: the text is not base64, or has another length.
    """
    try:
        handle = base64.b64decode(b64, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedPayloadError("raw_handle must be base64") from None
    if len(handle) != HANDLE_BYTES:
        raise MalformedPayloadError(f"raw_handle must be {HANDLE_BYTES} bytes, got {len(handle)}")
    return handle
