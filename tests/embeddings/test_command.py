"""`normalign text-norm` as a process: one row a model, little memory, no torch."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .helpers import NAME, ROWS, T, checkpoint
from .hub_server import local_hub

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "typer")
MAX_MB = 256
# Runs the command with what is heavy made unimportable, then tells the peak memory of this process alone.
RUN = """
import sys
sys.modules.update(dict.fromkeys({heavy!r}))
from normalign.__main__ import main
try:
    main()
finally:
    status = open("/proc/self/status").read() if sys.platform == "linux" else "VmHWM: 0"
    print("peak", status.split("VmHWM:")[1].split()[0], file=sys.stderr)
"""


def text_norm(*arguments: str, heavy: tuple[str, ...] = HEAVY, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command's process; it fails if it goes beyond the memory that is allowed."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(heavy=heavy), "text-norm", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1,localhost", **environment},
    )
    told, _, peak = done.stderr.rpartition("peak ")
    assert int(peak) * 1024 / 1e6 < MAX_MB
    done.stderr = told
    return done


def test_one_failing_model_does_not_lose_the_others(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "good", {NAME: ROWS})
    gemma = checkpoint(tmp_path / "gemma", {NAME: ROWS.bfloat16()}, {"model_type": "gemma2", "vocab_size": 4})
    bad = checkpoint(tmp_path / "bad", {"norm.weight": torch.ones(3)})
    done = text_norm(str(good), str(bad), str(gemma), "--json")
    assert done.returncode == 1
    one, failed, two = json.loads(done.stdout)["models"]
    assert (one["model"], one["T"], one["embedding_scale"]) == (str(good), pytest.approx(T), 1.0)
    assert (two["dtype"], two["T_as_used"]) == ("BF16", pytest.approx(T * 2**0.5))
    assert set(failed) == {"model", "error"}
    assert done.stderr == f"error: {failed['error']}\n"
    assert failed["error"].startswith(f"{bad}: no tensor is named like")


def test_the_table_has_a_row_for_each_model_and_errors_below_it(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "good", {NAME: ROWS})
    done = text_norm(str(good), str(tmp_path / "absent"))
    assert done.returncode == 1
    row = next(line for line in done.stdout.splitlines() if str(good) in line).split()[1:]
    assert row[:3] == ["5.667", "3.300", "5.000"]
    assert row[-4:] == ["1", "4", "2", "4.007"]
    absent = next(line for line in done.stdout.splitlines() if str(tmp_path / "absent") in line).split()[1:]
    assert absent == ["-"] * len(row)
    assert "as used" not in done.stdout
    assert re.fullmatch(r"error: .*absent: no such file or folder.*\n", done.stderr)
    assert "normalign attach" in done.stdout.splitlines()[-1]


def test_a_scaled_embedding_shows_both_norms(tmp_path: Path) -> None:
    gemma = checkpoint(tmp_path / "gemma", {NAME: ROWS}, {"model_type": "gemma3", "text_config": {}})
    done = text_norm(str(gemma))
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if str(gemma) in line).split()
    assert (row[1], row[-2], row[-1]) == ("5.667", "1.414", "8.014")


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_where_every_model_fails_each_has_one_line_on_stderr(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    checkpoint(tmp_path, {NAME: ROWS.log()})  # log of 0: not finite
    done = text_norm(str(tmp_path), "no", *arguments)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == f"error: {tmp_path}: 2 embedding rows are not finite; fetch the weights again"
    assert second.startswith("error: no: no such file or folder")
    assert bool(done.stdout) == bool(arguments)


def test_the_hub_is_read_without_torch_too(tmp_path: Path) -> None:
    checkpoint(tmp_path / "org" / "model", {NAME: ROWS})
    with local_hub(tmp_path) as hub:
        done = text_norm("org/model", "--json", HF_ENDPOINT=hub.endpoint)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["models"][0]["T"] == pytest.approx(T)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_embedding(tmp_path: Path) -> None:
    rows, width = 100_000, 4096  # 819 MB in bfloat16, of which all but the last row is a hole in the file
    size = rows * width * 2
    header = json.dumps({NAME: {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(size - 2 * width, 1)
        file.write(struct.pack("<H", 0x3F80) * width)  # ones
    done = text_norm(str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["models"][0]
    assert (row["T"], row["zero_rows"]) == (64.0, rows - 1)


def test_the_shortcut_prints_what_typer_would(tmp_path: Path) -> None:
    checkpoint(tmp_path, {NAME: ROWS})
    command = [sys.executable, "-m", "normalign.cli", "text-norm", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_norm(str(tmp_path), "--json").stdout


@pytest.mark.parametrize(("arguments", "code"), [(("--help",), 0), ((), 2), (("--no-such-option", "x"), 2)])
def test_help_and_wrong_options_are_typers(arguments: tuple[str, ...], code: int) -> None:
    done = text_norm(*arguments, heavy=("torch", "transformers"))
    assert done.returncode == code
    assert "text-norm" in done.stdout + done.stderr
