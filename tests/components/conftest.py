"""A working copy to run components in: params.yaml in an empty folder, which becomes the current one."""

import dataclasses
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from normalign.files import write_json, write_text
from normalign.headline import headline
from normalign.settings import Profile, load_profile

ROOT = Path(__file__).parents[2]
T, WIDTH = 3.2, 64
STEPS = 20


def point(ratio: float, gap: float) -> dict[str, Any]:
    """A point of training in probe.json; what the components do not read is left out."""
    layers = {"norm_median": [1.0, 2.0, 3.0], "cosine": [0.9, 0.95]}
    return {
        "ratio": ratio,
        "k_in_context": ratio,
        "sync_gap": {"all": gap / 2, "first8": gap},
        "layers": {"visual": layers, "text": layers},
    }


@dataclass
class Results:
    """Writes a profile's metric files as the stages do, so that every expectation holds."""

    profile: Profile

    def data(self) -> None:
        """The metric files that `check_data` and `register` read."""
        manifest = {
            "read": 16,
            "kept": 16,
            "dropped": 0,
            "dropped_by_reason": {},
            "turns": 16,
            "fingerprint": "ab",
        }
        write_json(
            self.profile.folder / "dataset.json",
            {
                "stage1": manifest,
                "stage2": manifest,
                "benchmarks": {"presence": 8, "choice": 12, "reading": 8, "text": 12},
                "fingerprint": "d47a",
            },
        )
        write_json(
            self.profile.folder / "text_norm.json",
            {
                "T": T,
                "rows": 100,
                "zero_rows": 2,
                "hidden_size": WIDTH,
                "g_init": round(T / math.sqrt(WIDTH), 6),
            },
        )
        write_json(self.profile.folder / "encoder_norm.json", {"selected": {"mean": 41.5}})
        write_json(
            self.profile.folder / "language_reference.json",
            {"tasks": {"text": {"items": 240, "chance": 0.25, "accuracy": 0.5, "stderr": 0.03}}},
        )
        source = {"source": "random:", "sha256": "beef"}
        write_json(self.profile.folder / "weights.json", {"vision": source, "language": source})

    def variant(self, variant: str) -> None:
        """The metric files of a variant: visual tokens 12 times too long, or as the variant intends."""
        folder = self.profile.results(variant)
        intended = self.profile.variant(variant).intended_ratio
        ratio, gap = (12.0, 0.2) if intended is None else (intended, 0.05)
        write_json(
            folder / "probe.json",
            {"points": {name: point(ratio, gap) for name in ("init", "stage1", "stage2")}},
        )
        task = {"items": 8, "accuracy": 0.75, "stderr": 0.1, "kind": "visual"}
        pooled = {"accuracy": 0.7, "stderr": 0.02, "shuffled_accuracy": 0.5, "difference": 0.2}
        pooled |= {"difference_stderr": 0.05, "low": 0.1, "high": 0.3, "confidence": 0.95}
        tasks = {"presence": task, "text": task | {"kind": "text", "accuracy": 0.5}}
        write_json(folder / "evaluation.json", {"tasks": tasks, "pooled_visual": pooled})
        for stage in ("stage1", "stage2"):
            vision = "" if stage == "stage1" else "0.5"
            rows = [f"{step},{4 - step / STEPS},1.5,{vision}" for step in range(1, STEPS + 1)]
            write_text(folder / f"{stage}.csv", "\n".join(["step,loss,grad_total,grad_vision", *rows]) + "\n")
        write_json(folder / "summary.json", headline(self.profile, variant))

    def model(self, variant: str) -> Path:
        """A stand-in for the stage-2 checkpoint: files to hash and to copy."""
        folder = self.profile.model_folder(variant, "stage2")
        write_text(folder / "config.json", f'{{"variant": "{variant}"}}')
        write_text(folder / "nested" / "weights.bin", variant * 100)
        return folder


@pytest.fixture
def ci_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Profile `ci` with the gates of a real one: images matter, the language model knows something."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    profile = load_profile("ci")
    check = dataclasses.replace(profile.check, images_matter=True, text_above_chance=0.1)
    return dataclasses.replace(profile, check=check)


@pytest.fixture
def results(ci_profile: Profile) -> Results:
    """Good results of profile `ci`: the data's, and those of three variants with stand-ins for their models."""
    written = Results(ci_profile)
    written.data()
    for variant in ("baseline", "norm", "norm_gwc"):
        written.variant(variant)
        written.model(variant)
    return written
