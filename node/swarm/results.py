"""What a swarm leaves behind besides its report: the picture, the final checkpoint, a sample of its text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from atoll.protocol.manifest import Manifest

from .ledger import Evaluation
from .processes import Family, Interrupts, child_environment

SAMPLE_PROMPT = "import os\n\ndef "
SAMPLE_PATIENCE = 60.0


def draw(curve: list[Evaluation], bars: Mapping[str, float], title: str, path: Path) -> bool:
    """Write the plot; False when there is nothing to plot."""
    if not curve:
        return False
    from .plot import plot_loss

    plot_loss(curve, bars, title, path)
    return True


def export_checkpoint(out: Path, manifest: Manifest) -> Path | None:
    """Copy the newest exported checkpoint of any process of the swarm to ``out/checkpoint``; its path there."""
    newest: tuple[int, Path] | None = None
    for meta in sorted(out.rglob("step-*.json")):
        tensors = meta.with_suffix(".safetensors")
        try:
            found = json.loads(meta.read_text())
            step = int(found["outer_step"])
            if found["run"] == manifest.run_id.hex() and tensors.exists() and (newest is None or step > newest[0]):
                newest = (step, meta)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    if newest is None:
        return None
    folder = out / "checkpoint"
    folder.mkdir(exist_ok=True)
    for file in (newest[1].with_suffix(".safetensors"), newest[1]):
        shutil.copy2(file, folder / file.name)
    return folder / newest[1].with_suffix(".safetensors").name


def write_sample(family: Family, interrupts: Interrupts, checkpoint: Path, out: Path, device: str) -> Path | None:
    """Let ``atoll generate`` continue a few words with the checkpoint; None when it did not work out."""
    folder = out / "sample"
    arguments = ["atoll", "generate", str(checkpoint), "--prompt", SAMPLE_PROMPT, "--length", "600", "--json"]
    child = family.start("sample", folder, [*arguments, "--device", device], child_environment(1))
    for _ in range(int(SAMPLE_PATIENCE / 0.1)):
        if child.code is not None or interrupts.wait(0.1):
            break
    family.kill()
    family.children.pop("sample")
    try:
        if child.code != 0:
            return None
        text = json.loads(child.output.read_text().splitlines()[-1])["text"]
        path = out / "sample.txt"
        path.write_text(text + "\n")
        shutil.rmtree(folder)
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return path
