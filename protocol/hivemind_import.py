"""The parts of hivemind that atoll uses, imported so that the import changes nothing else in the process.

Import this module late: hivemind brings torch with it (2 to 3 s, some 250 MB). Its import also fixes the start
method of ``multiprocessing``, renames the log level WARNING, and puts a handler of its own on its loggers; all
three are undone here. Two warnings that its dependencies raise are silenced, by name.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from pathlib import Path

_start_method = multiprocessing.get_start_method(allow_none=True)

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.* is deprecated", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r"pkg_resources is deprecated", category=UserWarning)
    import hivemind.dht.node
    import hivemind.dht.protocol
    import hivemind.dht.routing
    import hivemind.hivemind_cli
    import hivemind.utils.timed_storage
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.p2p import P2P, P2PContext, PeerID
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.timed_storage import ValueWithExpiration

if _start_method is None:
    multiprocessing.set_start_method(None, force=True)
logging.addLevelName(logging.WARNING, "WARNING")
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.ERROR)  # its warnings are about what any stranger may send

P2PD = Path(hivemind.hivemind_cli.__path__[0]) / "p2pd"
"""The p2p daemon that comes with hivemind: a Go program around go-libp2p."""


def correct_dht_time(seconds: float) -> None:
    """Let hivemind's DHT go by a clock that is so many seconds ahead of this machine's.

    hivemind asks a function of a module for the time, so this holds for the whole process; but so does the clock that
    is wrong.
    """
    for module in (hivemind.utils.timed_storage, hivemind.dht.node, hivemind.dht.protocol, hivemind.dht.routing):
        assert hasattr(module, "get_dht_time")
        module.get_dht_time = (lambda: time.time() + seconds) if seconds else time.time


__all__ = [
    "DHTID",
    "P2P",
    "P2PD",
    "DHTLocalStorage",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PContext",
    "PeerID",
    "RecordValidatorBase",
    "ValueWithExpiration",
    "correct_dht_time",
    "dht_pb2",
    "p2pd_pb2",
]
