"""A node's public name when its owner gives none: two words that follow from its peer id, which everybody knows anyway.

The host's name would say more of a machine than the run needs.
"""

from __future__ import annotations

from blake3 import blake3

_FIRST = (
    "amber ashen azure balmy blithe brave breezy bright brisk bronze calm candid cedar civil clear cobalt copper "
    "coral cosmic crisp dapper deft dewy eager early easy even fabled fair fleet fond frank fresh gentle glad "
    "golden grand green hale hardy hazel honest humble indigo ivory jade jolly keen kind late light lilac limber "
    "lively lucid lunar mellow merry mild misty modest"
)
_SECOND = (
    "albatross anemone angler barnacle beluga bittern blenny bonito brill bream capelin clam cockle cod conch "
    "cormorant crab curlew cuttle dolphin dory dugong dunlin eel egret eider flounder frigate gannet goby grebe "
    "grouper guillemot gull gurnard haddock hake halibut heron herring kelp kittiwake krill lamprey limpet "
    "lobster mackerel manta marlin mullet murre mussel narwhal nautilus octopus osprey otter oyster pelican "
    "petrel piper plaice plover puffin"
)


def public_name(peer: str) -> str:
    """Two words for a peer id, e.g. ``brisk-puffin``; the same for the same id, and not unique."""
    digest = blake3(peer.encode()).digest()
    first, second = _FIRST.split(), _SECOND.split()
    return f"{first[digest[0] % len(first)]}-{second[digest[1] % len(second)]}"
