"""The package as users get it: layout, declared dependencies, pinned versions, and the files around the code."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import atoll

TREE = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "node", "bootstrap")
INSTALLED = Path(atoll.__file__).resolve().parent

checkout = pytest.mark.skipif(not (TREE / "Makefile").exists(), reason="needs the whole source tree, not a wheel")

# Names as they are imported, where they differ from those of the distributions that bring them.
DISTRIBUTIONS = {"google": "protobuf", "yaml": "pyyaml"}


def project() -> dict[str, Any]:
    with (TREE / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
        return table


def sources(package: str) -> Iterator[Path]:
    yield from sorted((INSTALLED / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, those inside functions included."""
    # The folder's symlink is resolved by now in a checkout: count from the package's own name.
    parts = path.with_suffix("").parts
    first = max(i for i, part in enumerate(parts) if part in PACKAGES and i > 0)
    package = ("atoll", *parts[first:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join((*base, *((node.module,) if node.module else ())))
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def test_packages_are_typed_and_installed_under_one_name() -> None:
    for package in ("", *PACKAGES):
        module = importlib.import_module(".".join(filter(None, ("atoll", package))))
        assert resources.files(module).joinpath("py.typed").is_file(), f"{module.__name__} has no py.typed"
    distribution = importlib.metadata.distribution("atoll")
    assert distribution.version == atoll.__version__
    (entry,) = [e for e in distribution.entry_points if e.name == "atoll"]
    assert entry.value == "atoll.__main__:main"
    assert callable(entry.load())


@checkout
def test_symlinks_lead_to_the_packages_and_git_keeps_them() -> None:
    for package in PACKAGES:
        link = TREE / "src" / "atoll" / package
        assert link.is_symlink(), (
            f"{link} is no symlink; on Windows: git config core.symlinks true, and check out again"
        )
        assert link.resolve() == TREE / package
        assert not Path(os.readlink(link)).is_absolute()
    if not (TREE / ".git").exists():
        return
    listed = subprocess.run(
        ["git", "ls-files", "-s", "src/atoll"], cwd=TREE, capture_output=True, text=True, check=True
    )
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert {modes[f"src/atoll/{package}"] for package in PACKAGES} == {"120000"}


@pytest.mark.parametrize(
    ("package", "forbidden"), [("protocol", ("node", "bootstrap")), ("node", ("bootstrap",)), ("bootstrap", ("node",))]
)
def test_layers(package: str, forbidden: tuple[str, ...]) -> None:
    for path in sources(package):
        for name in imports(path):
            for other in forbidden:
                full = f"atoll.{other}"
                assert not f"{name}.".startswith(f"{full}."), f"{path} imports {name}"


def test_protocol_knows_no_models_or_devices() -> None:
    for path in sources("protocol"):
        roots = {name.split(".")[0] for name in imports(path)}
        # hivemind itself needs torch; nothing of ours under protocol/ may.
        assert not roots & {"torch", "matplotlib", "rich", "typer"}, f"{path} imports {sorted(roots)}"


def test_nothing_is_imported_by_a_generic_name() -> None:
    for package in PACKAGES:
        for path in sources(package):
            roots = {name.split(".")[0] for name in imports(path)}
            assert not roots & set(PACKAGES), f"{path}: write `from atoll.{package}...`"


@checkout
def test_what_is_imported_is_declared() -> None:
    table = project()
    extras = [line for extra, lines in table["optional-dependencies"].items() if extra != "dev" for line in lines]
    declared = {canonicalize_name(Requirement(line).name) for line in (*table["dependencies"], *extras)}
    for package in PACKAGES:
        for path in sources(package):
            for name in imports(path):
                root = name.split(".")[0]
                if root in sys.stdlib_module_names or root == "atoll":
                    continue
                distribution = canonicalize_name(DISTRIBUTIONS.get(root, root))
                assert distribution in declared, f"{path} imports {root}, which pyproject.toml does not declare"


@checkout
def test_constraints_pin_every_requirement() -> None:
    pins: dict[str, Version] = {}
    for line in (TREE / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s+]+)", line)
            assert match, f"constraints.txt: {line!r} is not NAME==VERSION without a local version"
            pins[canonicalize_name(match[1])] = Version(match[2])
    assert list(pins) == sorted(pins)

    table = project()
    todo = [Requirement(line) for line in (*table["dependencies"], *table["optional-dependencies"]["dev"])]
    environment = {**default_environment(), "extra": ""}
    seen: set[str] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        # Parts of PyTorch's CUDA builds are pinned by PyTorch itself.
        if (requirement.marker and not requirement.marker.evaluate(environment)) or name.startswith(
            ("nvidia-", "triton", "cuda-")
        ):
            continue
        assert name in pins, f"constraints.txt does not pin {name}"
        assert pins[name] in requirement.specifier, (
            f"constraints.txt pins {name}=={pins[name]}, needed is {requirement}"
        )
        if name not in seen:
            seen.add(name)
            todo += [Requirement(line) for line in importlib.metadata.requires(name) or []]
    for extra in map(Requirement, table["optional-dependencies"]["bench"]):
        # Not always installed, so what it needs itself is not followed.
        assert pins[canonicalize_name(extra.name)] in extra.specifier
        seen.add(canonicalize_name(extra.name))
    assert set(pins) == seen, f"constraints.txt pins what nothing needs: {sorted(set(pins) - seen)}"


@checkout
def test_constraints_are_what_is_tested() -> None:
    optional = {Requirement(line).name for line in project()["optional-dependencies"]["bench"]}
    for line in (TREE / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            if name in optional and find_spec(name) is None:
                continue
            assert importlib.metadata.version(name).split("+")[0] == version, "the environment differs: make install"


@checkout
def test_make_help_lists_every_target() -> None:
    makefile = (TREE / "Makefile").read_text(encoding="utf-8")
    phony = set(re.findall(r"^\.PHONY: (\w+)$", makefile, re.MULTILINE))
    assert phony >= {"help", "swarm", "test", "lint", "types", "format", "wheel", "clean"}
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=TREE, capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[0] for line in shown.splitlines() if line.startswith("  ")} == phony


@checkout
@pytest.mark.parametrize("interpreter", ["no-such-python", "old"])
def test_make_says_what_is_wrong_with_python(interpreter: str, tmp_path: Path) -> None:
    if interpreter == "old":
        fake = tmp_path / "python3"
        fake.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo "Python 3.9.2"; exit 0; }\nexit 1\n')
        fake.chmod(0o755)
        interpreter = str(fake)
    done = subprocess.run(
        ["make", "install", f"PYTHON={interpreter}", f"VENV={tmp_path / 'venv'}"],
        cwd=TREE,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


@checkout
def test_make_touches_no_folder_that_is_not_an_environment(tmp_path: Path) -> None:
    kept = tmp_path / "letters" / "draft.txt"
    kept.parent.mkdir()
    kept.write_text("dear reader")
    for target in ("install", "distclean"):
        done = subprocess.run(
            ["make", target, f"VENV={kept.parent}", "SOURCES=tests/unit/none"], cwd=TREE, capture_output=True
        )
        assert done.returncode != 0
        assert kept.read_text() == "dear reader"


@checkout
def test_no_file_names_a_package_index() -> None:
    """A user's own index is a setting of pip or a build argument, never part of the project."""
    files = ["Makefile", "pyproject.toml", "constraints.txt", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", ".ci/run"]
    paths = [TREE / name for name in files] + [
        p for d in ("docker", "docs") for p in (TREE / d).rglob("*") if p.is_file()
    ]
    for path in paths:
        if path.suffix in {".png", ".pdf"}:
            continue
        assert not re.search(r"\bpypi\.|pythonhosted|download\.pytorch|simple/", path.read_text(encoding="utf-8")), path


@checkout
def test_scripts_are_executable() -> None:
    for name in (".ci/run", ".ci/wheel_tests", "docker/entrypoint.sh"):
        path = TREE / name
        assert os.access(path, os.X_OK), f"{name} is not executable"
        assert path.read_bytes().startswith(b"#!")


def smoke_report(**changes: Any) -> dict[str, Any]:
    peers = ["12D3KooWA", "12D3KooWB"]
    report: dict[str, Any] = {
        "run_id": "ab" * 32,
        "nodes": 2,
        "rounds": 3,
        "tokens": 1000,
        "val_loss": [[0, 5.5], [3, 4.0]],
        "digests_equal": True,
        "bytes_sent_per_node": {"node 1": 10, "node 2": 12},
        "seconds": 20.5,
        "rosters": [[1, peers], [2, peers], [3, peers]],
        "exit_codes": {"bootstrap": 0, "node 1": 0, "node 2": 0},
    }
    return report | changes


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"digests_equal": False}, "same state"),
        ({"val_loss": [[0, 4.0], [3, 5.5]]}, "did not fall"),
        ({"val_loss": [[0, 4.0], [3, None]]}, "not a curve"),
        ({"bytes_sent_per_node": {"node 1": 10, "node 2": 0}}, "sent something"),
        ({"rosters": [[1, ["12D3KooWA"]]]}, "two members"),
        ({"exit_codes": {"bootstrap": 0, "node 1": 0, "node 2": -9}}, "ended with 0"),
        ({"rounds": 2}, "expected 3"),
        ({"run_id": "demo"}, "hexadecimal"),
    ],
)
def test_smoke_check_sees_faults(changes: dict[str, Any], word: str | None, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(smoke_report(**changes)))
    script = Path(__file__).resolve().parents[1] / "smoke_check.py"
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True)
    assert done.returncode == (0 if word is None else 1)
    assert word is None or word in done.stderr


@checkout
def test_links_between_the_documents_lead_somewhere() -> None:
    documents = [*TREE.glob("*.md"), *(TREE / "docs").rglob("*.md")]
    assert len(documents) > 8
    broken = []
    for document in documents:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = document.parent / path if path else document
            if not file.exists():
                broken.append(f"{document.relative_to(TREE)}: {target}")
            elif anchor and anchor not in anchors(file):
                broken.append(f"{document.relative_to(TREE)}: no heading for {target}")
    assert not broken


def anchors(document: Path) -> set[str]:
    """The names under which a document's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
