"""Check what is in a wheel: ``python tests/check_wheel.py dist/atoll-*.whl``. Ends with 1 and the reasons if wrong."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

PACKAGES = ("protocol", "node", "bootstrap")
ROOT = Path(__file__).resolve().parent.parent


def faults(wheel: Path) -> list[str]:
    """What is wrong with ``wheel``, in words; empty when it holds exactly the sources of this tree."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next((n for n in names if re.fullmatch(r"atoll-[^/]+\.dist-info/METADATA", n)), None)
        entry_points = next((n for n in names if n.endswith(".dist-info/entry_points.txt")), None)
        entries = archive.read(entry_points).decode() if entry_points else ""
    found = []
    if metadata is None:
        found.append("there is no METADATA")
    if "atoll = atoll.__main__:main" not in entries:
        found.append("the console script `atoll` is missing")
    if not any(re.search(r"\.dist-info/(licenses/)?LICENSE$", n) for n in names):
        found.append("the LICENSE is missing")

    expected = {
        "atoll/" + p.name for p in (ROOT / "src" / "atoll").iterdir() if p.suffix == ".py" or p.name == "py.typed"
    }
    for package in PACKAGES:
        expected |= {f"atoll/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / package).rglob("*.py")}
        expected.add(f"atoll/{package}/py.typed")
    content = {n for n in names if ".dist-info/" not in n}
    found += [f"{name} is missing" for name in sorted(expected - content)]
    found += [f"{name} does not belong there" for name in sorted(content - expected) if not name.startswith("atoll/")]
    found += [f"{name} is stale: no such file here" for name in sorted(content - expected) if name.endswith(".py")]
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: check_wheel.py WHEEL (one)", file=sys.stderr)
        return 2
    found = faults(Path(arguments[0]))
    for fault in found:
        print(f"{arguments[0]}: {fault}", file=sys.stderr)
    if not found:
        print(f"{arguments[0]}: complete")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
