"""A change of a layer in a fleet: everywhere or nowhere, whoever fails, hangs or ends in the middle of it."""

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from normserve.codec import safetensors
from normserve.errors import (
    ChangeFailedError,
    DeviceOutOfMemoryError,
    InvalidParameterError,
    StorageError,
    TooLargeError,
    UnknownLayerError,
)
from normserve.jobs.job import RegisteredLayer
from normserve.layers import layer_changes
from normserve.layers.layer_changes import LayerChanges
from normserve.layers.registry import LayerRegistry
from normserve.memory.tensors import DType
from normserve.peers.sibling_processes import SiblingProcesses

from tests.service.layers.fleet import BODY, Process, agreed, failing, files, fleet_of, layer


@fleet_of(3)
async def test_what_one_registers_all_have(fleet):
    assert await fleet.a.put("a") is False
    assert [each.layers for each in fleet.processes] == [{"a": b"first"}] * 3
    assert await fleet.b.put("a", b"second") is True
    assert [each.layers for each in fleet.processes] == [{"a": b"second"}] * 3
    await fleet.processes[2].changes.remove("a")
    assert [each.layers for each in fleet.processes] == [{}] * 3
    assert files(fleet) == []


@fleet_of(2)
async def test_many_changes_on_all_at_once_end_alike(fleet):
    async def change(index: int) -> None:
        process = fleet.processes[index % 2]
        with contextlib.suppress(UnknownLayerError):
            if index % 5 == 4:
                await process.changes.remove(f"layer{index % 3}")
            else:
                await process.put(f"layer{index % 3}", str(index).encode())

    await asyncio.gather(*map(change, range(40)))
    held = await agreed(fleet)
    entries = [await fleet.a.journal.read_entry_file(file) for file in await fleet.a.journal.list_entry_files()]
    assert held == {entry.name: entry.query for entry in entries}


@fleet_of(2)
async def test_what_another_cannot_take_none_has(fleet):
    await fleet.a.put("a")
    fleet.b.at_making = failing(DeviceOutOfMemoryError("no memory"))
    with pytest.raises(ChangeFailedError, match="process 1 could not take it: no memory"):
        await fleet.a.put("a", b"second")
    with pytest.raises(ChangeFailedError):
        await fleet.a.put("b")
    assert await agreed(fleet) == {"a": b"first"}
    assert len(files(fleet)) == 1
    fleet.b.at_making = None
    await fleet.a.put("a", b"second")
    assert await agreed(fleet) == {"a": b"second"}


@fleet_of(2)
async def test_what_cannot_be_registered_here_is_told_to_nobody(fleet):
    fleet.b.at_making = failing(AssertionError("asked"))
    fleet.a.at_making = failing(InvalidParameterError("no"))
    with pytest.raises(InvalidParameterError):
        await fleet.a.put("a")
    with pytest.raises(UnknownLayerError):
        await fleet.a.changes.remove("a")
    fleet.a.at_making = None
    fleet.a.registry._max_layers = 0
    with pytest.raises(TooLargeError):
        await fleet.a.put("a")
    assert await agreed(fleet) == {}
    assert files(fleet) == []


@fleet_of(2)
async def test_a_full_disk_changes_nothing(fleet):
    await fleet.a.put("a")

    def full(pieces):
        raise OSError(28, "No space left on device")

    fleet.a.journal._write_staged = full
    with pytest.raises(StorageError, match="No space left"):
        await fleet.a.put("a", b"second")
    assert await agreed(fleet) == {"a": b"first"}
    await fleet.b.put("a", b"third")
    assert await agreed(fleet) == {"a": b"third"}


@fleet_of(2, "ln")
async def test_a_disk_that_fails_at_the_last_moment_changes_nothing(fleet):
    async def fail(name) -> None:
        raise StorageError("it fails")

    fleet.a.journal.commit_staged = fleet.a.journal.remove = fail
    await fleet.b.put("a")
    for change in (fleet.a.put("a", b"second"), fleet.a.changes.remove("a"), fleet.a.changes.remove("ln")):
        with pytest.raises(StorageError):
            await change
    assert await agreed(fleet) == {"a": b"first", "ln": b"checkpoint"}
    assert len(files(fleet)) == 1


@fleet_of(2)
async def test_one_that_hangs_fails_the_change_and_knows_of_none(fleet):
    gate = asyncio.Event()
    fleet.b.at_making = gate.wait
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_changes, "_PREPARE_S", 0.05)
        with pytest.raises(ChangeFailedError):
            await fleet.a.put("a")
    gate.set()
    await fleet.a.put("b")
    assert await agreed(fleet) == {"b": b"first"}


@fleet_of(2)
async def test_one_that_hangs_after_it_agreed_follows_as_soon_as_it_can(fleet):
    async with fleet.b.changes._apply_lock:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_changes, "_APPLY_S", 0.05)
            await put_while_prepared(fleet)
        assert fleet.b.layers == {}
    assert await agreed(fleet) == {"a": b"first"}


async def put_while_prepared(fleet) -> None:
    """Register with `b` prepared, though its lock is held by the test."""
    held = fleet.b.changes._apply_lock
    fleet.b.changes._apply_lock = asyncio.Lock()
    commit = fleet.a.journal.commit_staged

    async def commit_and_hang(name: str) -> None:
        await commit(name)
        fleet.b.changes._apply_lock = held

    fleet.a.journal.commit_staged = commit_and_hang
    await fleet.a.put("a")


@fleet_of(2)
async def test_whoever_ends_in_the_middle_of_a_change_leaves_it_done_or_undone(fleet):
    """Everything that a killed process does for others is that its sockets and its locks go."""
    for committed in (False, True):
        name = f"committed {committed}"
        async with fleet.a.changes._hold_fleet_lock(), fleet.a.siblings.connect_all_listening() as links:
            await fleet.a.journal.stage(name, "change", b"first", [BODY])
            await links[0].send_request({"do": "prepare", "name": name, "change": "change"}, 1)
            if committed:
                await fleet.a.journal.commit_staged(name)
    restarted = await Process(0, 2, fleet.folder).start()
    fleet.processes[0].server.close()
    fleet.processes[0] = fleet.a = restarted
    assert await agreed(fleet) == {"committed True": b"first"}
    while fleet.b.changes._prepared_layer is not None:
        await asyncio.sleep(0.001)
    await fleet.a.put("a")
    assert await agreed(fleet) == {"committed True": b"first", "a": b"first"}


@fleet_of(2, "ln.a", "ln.b")
async def test_a_removed_layer_of_the_checkpoint_stays_removed(fleet):
    await fleet.a.changes.remove("ln.a")
    await fleet.a.put("ln.b", b"replaced")
    assert await agreed(fleet) == {"ln.b": b"replaced"}
    late = await Process(1, 2, fleet.folder).start("ln.a", "ln.b")
    assert late.layers == {"ln.b": b"replaced"}
    late.server.close()
    await fleet.a.put("ln.a", b"again")
    await fleet.a.changes.remove("ln.b")
    assert len(files(fleet)) == 2
    later = await Process(1, 2, fleet.folder).start("ln.a", "ln.b")
    assert later.layers == {"ln.a": b"again"}
    later.server.close()


@fleet_of(2)
async def test_the_journal_is_no_larger_than_the_layers(fleet):
    header = safetensors.encode_header({"weight": (DType.FLOAT32, (1,))})
    spaces = b" " * 60_000
    text = header[8:].rstrip() + spaces
    bloated = memoryview(bytearray(len(text).to_bytes(8, "little") + text + bytes(4)))
    await fleet.a.changes.register_or_replace("a", b"first", bloated)
    assert await agreed(fleet) == {"a": b"first"}
    (file,) = (fleet.folder / "layers").iterdir()
    assert file.stat().st_size < 300


@fleet_of(2)
async def test_what_has_begun_is_finished_though_the_client_leaves(fleet):
    begun, gate = asyncio.Event(), asyncio.Event()

    async def make() -> None:
        begun.set()
        await gate.wait()

    fleet.b.at_making = make
    client = asyncio.create_task(fleet.a.put("a"))
    await begun.wait()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    gate.set()
    await fleet.b.put("b")
    assert await agreed(fleet) == {"a": b"first", "b": b"first"}


@fleet_of(2)
async def test_whoever_waits_too_long_for_others_is_told(fleet):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_changes, "_TURN_S", 0.02)
        async with fleet.b.changes._lock.hold(1):
            with pytest.raises(ChangeFailedError, match="other layers were being changed"):
                await fleet.a.put("a")
    await fleet.a.put("a")
    assert await agreed(fleet) == {"a": b"first"}


@fleet_of(2)
async def test_without_descriptors_nothing_is_changed(fleet):
    @contextlib.asynccontextmanager
    async def exhausted():
        raise OSError(24, "Too many open files")
        yield

    fleet.a.siblings.connect_all_listening = exhausted
    with pytest.raises(ChangeFailedError, match="Too many open files"):
        await fleet.a.put("a")
    fleet.a.changes._lock.hold = lambda timeout_s: exhausted()
    with pytest.raises(StorageError, match="Too many open files"):
        await fleet.a.put("a")
    assert await agreed(fleet) == {}


@fleet_of(2)
async def test_a_process_that_cannot_follow_asks_to_be_started_again(fleet):
    async def lost(question, at_end) -> bytes:
        return b""

    fleet.b.siblings.handlers["prepare"] = lost
    fleet.b.at_making = failing(DeviceOutOfMemoryError("no memory"))
    await fleet.a.put("a")
    assert fleet.b.diverged


@fleet_of(2)
async def test_a_replica_that_starts_meanwhile_has_them_all(fleet):
    fleet.b.server.close()
    putting = [asyncio.create_task(fleet.a.put(f"layer{index}")) for index in range(10)]
    await asyncio.sleep(0.005)
    fleet.processes[1] = await Process(1, 2, fleet.folder, max_layers=20).start()
    await asyncio.gather(*putting)
    assert len(await agreed(fleet)) == 10


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.sampled_from(["put", "remove", "fail", "restart"])),
        max_size=25,
    )
)
def test_after_any_history_all_have_what_a_single_process_would_have(tmp_path_factory, history):
    folder = tmp_path_factory.mktemp("fleet")

    async def play() -> None:
        processes = [await Process(index, 3, folder).start() for index in range(3)]
        expected: dict[str, bytes] = {}
        for step, (who, name, what) in enumerate(history):
            query = str(step).encode()
            if what == "restart":
                processes[who].server.close()
                processes[who] = await Process(who, 3, folder).start()
            elif what == "remove" and name in expected:
                await processes[who].changes.remove(name)
                del expected[name]
            elif what == "fail":
                broken = processes[(who + 1) % 3]
                broken.at_making = failing(DeviceOutOfMemoryError("no memory"))
                with pytest.raises(ChangeFailedError):
                    await processes[who].put(name, query)
                broken.at_making = None
            elif what == "put":
                assert await processes[who].put(name, query) is (name in expected)
                expected[name] = query
            assert [each.layers for each in processes] == [dict(sorted(expected.items()))] * 3
        for each in processes:
            each.server.close()

    asyncio.run(play())


def test_a_process_alone_needs_no_journal():
    registry = LayerRegistry(max_layers=1, max_bytes=2**20)

    async def make(name: str, query: bytes, body: memoryview) -> RegisteredLayer:
        return layer(name, query)

    async def play() -> None:
        changes = LayerChanges(registry, SiblingProcesses(None), make)
        await changes.synchronise()
        assert [(await changes.register_or_replace("a", b"", BODY))[1] for _ in range(2)] == [False, True]
        with pytest.raises(TooLargeError):
            await changes.register_or_replace("b", b"", BODY)
        await changes.remove("a")
        with pytest.raises(UnknownLayerError):
            await changes.remove("a")

    asyncio.run(play())
