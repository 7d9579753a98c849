"""The run's DHT on hivemind's Kademlia, with what hivemind leaves to its users.

- Only the run's keys exist, each a dictionary with one subkey a peer (its peer id in text). Plain values, unknown
  keys, oversized values and refused records are turned away one by one, wherever they come from: a replica with one
  bad entry keeps its good ones.
- A node's place in the DHT follows from its peer id, so nobody chooses which keys it holds.
- The remote procedures bear the run's id: peers of two runs never enter each other's tables.
- Nothing is cached and nothing refreshed behind the caller's back. In a small swarm every known node is asked
  directly; only from some two dozen nodes on are Kademlia's look-ups cheaper.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from .hivemind_import import (
    DHTID,
    P2P,
    DHTLocalStorage,
    DHTNode,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    P2PContext,
    PeerID,
    ValueWithExpiration,
    correct_dht_time,
    dht_pb2,
)
from .transport import Dht, PeerId
from .which import NOT_SERVED

log = logging.getLogger(__name__)

MAX_VALUE = 1024 + 256
"""Bytes of a stored value: a record of 1 KiB and its envelope."""
MAX_SUBKEYS = 1500
"""Peers under one key: two whole dictionaries must fit into one message of 4 MiB, or it never arrives."""
MAX_EXPIRES = 3600.0
"""Seconds that a value may live at most."""
SLACK = 15.0
"""Seconds by which clocks may differ before an expiry time counts as wrong."""

_KEYS_A_CALL = 2
_MAX_ENTRIES = 64
_REPLICAS = 5
_BUCKET = 16
_SMALL = 24
"""Up to this many known nodes all of them are asked directly."""
_RPC_TIMEOUT = 3.0
_WATCHED_FOR = 120.0
_FRESH = 0.5

Validate = Callable[[bytes, PeerId, bytes, float], bool]
"""(hash of the key, 20 bytes; peer of the subkey; value; expiry in unix seconds) → whether to keep it."""


class ValidatorObject(Protocol):
    """What hivemind calls a record validator."""

    def validate(self, record: Any) -> bool: ...


@runtime_checkable
class Gate(Protocol):
    """What :class:`~atoll.protocol.records.RecordGate` is: it sees subkey and value as MessagePack."""

    def acceptable(self, key: bytes, subkey: bytes, value: bytes, expiration: float, now: float) -> bool: ...


class GuardedProtocol(DHTProtocol):  # type: ignore[misc]
    """hivemind's DHT procedures with quotas. Subclassed by every :class:`HivemindDht`."""

    keys: frozenset[bytes]
    check: Callable[[bytes, bytes, bytes, float], bool]
    met: Callable[[], None]
    forgive: Callable[[Any], None]

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        entries = len(request.keys)
        columns = (request.subkeys, request.values, request.expiration_time, request.in_cache)
        if entries > _MAX_ENTRIES or any(len(column) != entries for column in columns):
            return dht_pb2.StoreResponse(store_ok=[False] * min(entries, _MAX_ENTRIES), peer=self.node_info)
        taken = [index for index in range(entries) if self._may_store(request, index)]
        filtered = dht_pb2.StoreRequest(
            keys=[request.keys[index] for index in taken],
            subkeys=[request.subkeys[index] for index in taken],
            values=[request.values[index] for index in taken],
            expiration_time=[request.expiration_time[index] for index in taken],
            in_cache=[False] * len(taken),
            peer=request.peer,
        )
        stored = iter((await super().rpc_store(filtered, context)).store_ok)
        kept = set(taken)
        return dht_pb2.StoreResponse(
            store_ok=[next(stored) if index in kept else False for index in range(entries)], peer=self.node_info
        )

    def _may_store(self, request: Any, index: int) -> bool:
        key, subkey = request.keys[index], request.subkeys[index]
        if key not in self.keys or subkey == self.IS_REGULAR_VALUE:
            return False
        if subkey == self.IS_DICTIONARY:
            return True  # its entries are checked one by one in _validate_dictionary
        if len(request.values[index]) > MAX_VALUE:
            return False
        held = self.storage.get(DHTID.from_bytes(key))
        if held is None or not isinstance(held.value, DictionaryDHTValue) or len(held.value) < MAX_SUBKEYS:
            return True
        try:
            return self.serializer.loads(subkey) in held.value  # full: only renewals
        except Exception:
            return False

    async def call_find(self, peer: Any, keys: Any) -> Any:
        found = await super().call_find(peer, keys)
        if not found:
            return found
        clean = {}
        for key, (value, nearest) in found.items():
            dictionary = value.value if value is not None else None
            if isinstance(dictionary, DictionaryDHTValue) and len(dictionary):
                # The replica's word on the expiry is not taken: a wrong one would end the search.
                value = ValueWithExpiration(dictionary, max(item.expiration_time for _, item in dictionary.items()))
            else:
                value = None
            clean[key] = value, {node: who for node, who in nearest.items() if node == node_id_of(who)}
        return clean

    async def update_routing_table(self, node_id: Any, peer_id: Any, responded: bool = True) -> None:
        if node_id is not None and node_id != node_id_of(peer_id):
            return
        if responded:
            if node_id is None and self.routing_table.get(peer_id=peer_id) is None:
                return
            self.forgive(peer_id)
        await super().update_routing_table(node_id, peer_id, responded)
        if responded:
            self.met()

    def _validate_record(self, key_bytes: bytes, subkey_bytes: bytes, value_bytes: bytes, expiration: float) -> bool:
        return self.check(key_bytes, subkey_bytes, value_bytes, expiration)

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        """Throw out what is not valid, keep the rest."""
        dictionary.maxsize = MAX_SUBKEYS
        with dictionary.freeze():
            items = list(dictionary.items())
        for number, (subkey, (value, expiration)) in enumerate(items):
            good = number < MAX_SUBKEYS and isinstance(subkey, str) and isinstance(value, bytes)
            if not good or not self.check(key_bytes, self.serializer.dumps(subkey), value, expiration):
                del dictionary[subkey]
        return True


class _Storage(DHTLocalStorage):  # type: ignore[misc]
    """Dictionaries of bounded size."""

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        if self.get(key) is None:
            dictionary = DictionaryDHTValue(MAX_SUBKEYS)
            dictionary.store(subkey, value, expiration_time)
            return bool(super().store(key, dictionary, expiration_time))
        return bool(super().store_subkey(key, subkey, value, expiration_time))


class _LiveCalls(dict[Any, Any]):
    """hivemind's calls under way, by id; those that were given up count as absent."""

    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()


def node_id_of(peer: Any) -> Any:
    """Where a peer stands in the DHT: the SHA-1 of its peer id."""
    return DHTID.generate(source=peer.to_bytes())


class HivemindDht(Dht):
    """One peer's part in the DHT. Lives through restarts of the p2p daemon: :meth:`attach` again.

    keys: the only keys there are.
    validator: a :class:`Gate`, an object with hivemind's ``validate(record)``, or a function, see :data:`Validate`.
    client: ask others only; store nothing, answer nothing (for peers that cannot be reached).
    """

    def __init__(
        self,
        run_id: bytes,
        peer_id: PeerId,
        *,
        keys: Iterable[str],
        validator: Validate | ValidatorObject | Gate,
        client: bool,
    ) -> None:
        self._peer_id = peer_id
        self._client = client
        self._ids: dict[str, Any] = {key: DHTID.generate(source=key) for key in keys}
        self._allowed = frozenset(key.to_bytes() for key in self._ids.values())
        self._validator = validator
        self._node: Any = None
        self._corrected = 0.0
        self._storage = _Storage()
        self.joined = asyncio.Event()
        """Set while at least one other node is known."""
        self._watched: dict[str, float] = {}
        self._found: dict[str, dict[PeerId, tuple[bytes, float]]] = {}
        self._found_at = -math.inf
        self._refreshing = asyncio.Lock()
        self._class = self._protocol_class(run_id)

    async def attach(self, p2p: P2P) -> None:
        """Take part through this daemon; what was stored here before is kept."""
        # An answer that comes in the moment its caller gives up would end hivemind's reader, and the DHT with it.
        p2p._client.control._pending_calls = _LiveCalls()
        node = await DHTNode.create(
            p2p=p2p,
            node_id=node_id_of(p2p.peer_id),
            bucket_size=_BUCKET,
            num_replicas=_REPLICAS,
            parallel_rpc=16,
            wait_timeout=_RPC_TIMEOUT,
            refresh_timeout=None,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            num_workers=4,
            blacklist_time=2.0,
            backoff_rate=1.5,
            client_mode=True,  # so that it registers no procedures: ours come next
        )
        making = self._class.create(
            p2p, node.node_id, _BUCKET, 5, _REPLICAS, _RPC_TIMEOUT, 16, 1, self._client, None, None
        )
        protocol = await _apart(making, 10.0)
        protocol.storage = self._storage
        node.protocol = protocol
        self._node = node

    def detach(self) -> None:
        """The daemon is gone. Nothing is awaited: hivemind would wait for its answers for ever."""
        if self._node is not None:
            self._node.is_alive = False
            self._node = None
        self.joined.clear()

    def neighbours(self) -> list[PeerId]:
        """Other nodes that are known now."""
        node = self._node
        return [] if node is None else [PeerId(str(peer)) for peer in node.protocol.routing_table.peer_id_to_uid]

    async def ping(self, peer: PeerId) -> str | None:
        """Greet a peer, so that both know each other. None, or why it did not work."""
        node = self._node
        if node is None:
            return "the p2p daemon is restarting"
        protocol, who = node.protocol, PeerID.from_base58(peer)
        try:
            request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
            call = protocol.get_stub(who).rpc_ping(request, timeout=_RPC_TIMEOUT)
            response = await _apart(call, _RPC_TIMEOUT + 1)
        except TimeoutError:
            reason = "connected, but it does not answer"
        except Exception as error:
            text = str(error)
            reason = NOT_SERVED if "not supported" in text else f"it does not answer: {' '.join(text.split())[:200]}"
        else:
            if response.peer and response.peer.node_id:
                await protocol.update_routing_table(DHTID.from_bytes(response.peer.node_id), who)
            return None
        await protocol.update_routing_table(protocol.routing_table.get(peer_id=who), who, responded=False)
        if not self.neighbours():
            self.joined.clear()
        return reason

    async def explore(self) -> None:
        """Look for the nodes nearest to this one, as every node does now and then."""
        node = self._node
        if node is not None:
            await _try_apart(node.find_nearest_nodes([node.node_id]), 30.0)

    def _wall(self) -> float:
        return time.time() + self._corrected

    def correct(self, seconds: float) -> None:
        """Go by a clock that is so many seconds ahead of this machine's."""
        self._corrected = seconds
        correct_dht_time(seconds)
        self._found_at = -math.inf

    async def publish(self, key: str, value: bytes, expires_in: float) -> bool:
        node, key_id = self._node, self._id(key)
        if node is None:
            return False
        expiration = self._wall() + min(expires_in, MAX_EXPIRES)
        packed = MSGPackSerializer.dumps(value)
        if not self._check(key_id.to_bytes(), MSGPackSerializer.dumps(self._peer_id), packed, expiration):
            log.warning("the own record under %s is not valid (%d bytes), it was not published", key, len(value))
            return False
        self._found_at = -math.inf
        protocol = node.protocol
        known = self._known(node)
        if len(known) > _SMALL:
            stored = await _try_apart(
                node.store(key, value, expiration, subkey=str(self._peer_id), exclude_self=self._client), 20.0
            )
            return bool(stored)
        if not self._client:
            known[node.node_id] = None
        replicas = sorted(known, key=key_id.xor_distance)[:_REPLICAS]
        others = [known[replica] for replica in replicas if replica != node.node_id]
        calls = [protocol.call_store(who, [key_id], [packed], expiration, [str(self._peer_id)]) for who in others]
        answers = await _try_apart(asyncio.gather(*calls), 20.0) or []
        stored_here = node.node_id in replicas and protocol.storage.store_subkey(
            key_id, str(self._peer_id), packed, expiration
        )
        return bool(stored_here) or any(answer and answer[0] for answer in answers)

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        self._id(key)
        self._watched[key] = time.monotonic()
        if not self._is_fresh(key):
            async with self._refreshing:  # one search serves all who wait, and all keys
                if not self._is_fresh(key):
                    await self._refresh()
        now = self._wall()
        return {peer: value for peer, (value, expiration) in self._found.get(key, {}).items() if expiration > now}

    def _is_fresh(self, key: str) -> bool:
        return key in self._found and time.monotonic() - self._found_at < _FRESH

    async def _refresh(self) -> None:
        """Read every key that is being watched."""
        now = time.monotonic()
        keys = [key for key, at in self._watched.items() if now - at < _WATCHED_FOR]
        ids = {self._ids[key]: key for key in keys}
        merged: dict[str, dict[PeerId, tuple[bytes, float]]] = {key: {} for key in keys}

        def merge(key_id: Any, dictionary: Any, packed: bool) -> None:
            entries = merged[ids[key_id]]
            for subkey, (value, expiration) in dictionary.items():
                if subkey not in entries or entries[subkey][1] < expiration:
                    entries[subkey] = MSGPackSerializer.loads(value) if packed else value, expiration

        node = self._node
        if node is not None:
            for key_id in ids:
                held = node.protocol.storage.get(key_id)
                if held is not None:
                    merge(key_id, held.value, True)
            known = self._known(node)
            if len(known) <= _SMALL:
                await self._ask_all(node, known, list(ids), lambda key_id, value: merge(key_id, value, True))
            else:
                found = await _try_apart(node.get_many_by_id(list(ids), math.inf), 20.0) or {}
                for key_id, result in found.items():
                    if result is not None and isinstance(result.value, dict):
                        merge(key_id, result.value, False)
        self._found = merged
        self._found_at = time.monotonic()

    async def _ask_all(
        self, node: Any, known: dict[Any, Any], keys: list[Any], take: Callable[[Any, Any], None]
    ) -> None:
        """Ask every known node, and whoever they name, for all keys."""
        asked = {node.node_id}
        while todo := {node_id: who for node_id, who in known.items() if node_id not in asked}:
            asked.update(todo)
            calls = [
                node._call_find_with_blacklist(who, keys[first : first + _KEYS_A_CALL])
                for who in todo.values()
                for first in range(0, len(keys), _KEYS_A_CALL)
            ]
            answers = await _try_apart(asyncio.gather(*calls), 20.0) or []
            for answer in answers:
                for key_id, (value, nearest) in (answer or {}).items():
                    if value is not None:
                        take(key_id, value.value)
                    if len(asked) < 2 * _SMALL:
                        known.update(nearest)

    def _protocol_class(self, run_id: bytes) -> type[GuardedProtocol]:
        """The procedures of this run on behalf of this node; the class's name goes over the wire."""
        attributes = {
            "_rpc_handlers": None,
            "_stub_type": None,
            "keys": self._allowed,
            "check": staticmethod(self._check),
            "met": staticmethod(self.joined.set),
            "forgive": staticmethod(self._forgive),
        }
        return type(f"atoll/1/{run_id.hex()[:16]}/dht", (GuardedProtocol,), attributes)

    def _forgive(self, who: Any) -> None:
        """A peer that was passed over because it did not answer is back."""
        if self._node is not None and who in self._node.blacklist:
            self._node.blacklist.register_success(who)

    def _known(self, node: Any) -> dict[Any, Any]:
        return dict(node.protocol.routing_table.uid_to_peer_id)

    def _id(self, key: str) -> Any:
        try:
            return self._ids[key]
        except KeyError:
            raise ValueError(f"{key!r} is none of the run's DHT keys") from None

    def _check(self, key: bytes, subkey: bytes, value: bytes, expiration: float) -> bool:
        """Whether an entry may be kept. ``subkey`` and ``value`` as hivemind packs them (MessagePack)."""
        if key not in self._allowed or len(value) > MAX_VALUE or not expiration <= self._wall() + MAX_EXPIRES + SLACK:
            return False
        try:
            peer, content = MSGPackSerializer.loads(subkey), MSGPackSerializer.loads(value)
            if not isinstance(peer, str) or not isinstance(content, bytes):
                return False
            if callable(self._validator):
                return bool(self._validator(key, PeerId(peer), content, expiration))
            if isinstance(self._validator, Gate):
                return self._validator.acceptable(key, subkey, value, expiration, self._wall())
            return bool(self._validator.validate(DHTRecord(key, subkey, value, expiration)))
        except Exception as error:
            log.debug("a DHT entry was refused: %r", error)
            return False


async def _apart(work: Any, seconds: float) -> Any:
    """Run hivemind's ``work`` in a task of its own, and leave it behind when we are cancelled or time is up.

    Awaited directly, it may swallow a cancellation (``asyncio.wait_for`` of Python 3.11 does), and then its
    caller never ends. Raises TimeoutError.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_look_at)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except BaseException:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise TimeoutError
    return task.result()


async def _try_apart(work: Any, seconds: float) -> Any:
    """As :func:`_apart`; None when time is up."""
    try:
        return await _apart(work, seconds)
    except TimeoutError:
        return None


def _look_at(task: asyncio.Future[Any]) -> None:
    """Else an exception that comes when nobody waits any more is reported as a defect."""
    if not task.cancelled():
        task.exception()
