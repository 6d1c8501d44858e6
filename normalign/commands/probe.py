"""`normalign probe`: everything that is measured on vision-language models and images, with a verdict."""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from tqdm import tqdm

from normalign.anatomy import find_anatomy, inputs_of, load_vlm
from normalign.anatomy.load import first_line
from normalign.commands.checkpoint import checkpoint_folder
from normalign.diagnosis.maps import map_entry
from normalign.diagnosis.pictures import Pictures
from normalign.diagnosis.probe import ModelProbe
from normalign.diagnosis.verdict import judge
from normalign.embeddings.source import find_embedding
from normalign.embeddings.statistics import text_norm_statistics
from normalign.files import NotWritten, write_json
from normalign.metrics import rounded
from normalign.report.doctor import print_results, write_page

DEFAULT_PROMPTS = ("Describe this image in detail.", "What is in the centre of the image, and what is around it?")
MAPS = 6  # images that get an attention map, for the first prompt


@dataclass(frozen=True)
class Request:
    """What to measure and how; ``parts`` are find_anatomy's options."""

    images: Path
    prompts: Path | None = None
    base: str | None = None
    out: Path | None = None
    trust_remote_code: bool = False
    parts: tuple[tuple[str, Any], ...] = ()


def probe(models: Sequence[str], request: Request, *, as_json: bool = False) -> bool:
    """Measure ``models``, one after the other; print tables and a verdict, or one JSON object.

    With ``request.out``: the page there, and each model's result (``result.json``; several: ``<number>/result.json``,
    the first being 1, whether all could be measured or not).

    Returns:
        Whether all of several models could be measured; one that fails loses no other.

    Raises:
        ValueError, OSError: the images, the prompts or the only model cannot be used; the message says what to do.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if request.out is not None:
        _check_writable(request.out)
    prompts, pictures = read_prompts(request.prompts), Pictures(request.images)
    base = None if request.base is None else base_text_norm(request.base)
    measured: dict[int, dict[str, Any]] = {}
    failed: list[dict[str, Any]] = []
    for number, (model, name) in enumerate(zip(models, short_names(models), strict=True), 1):
        try:
            result = rounded({"model": name, **measure(model, request, pictures, prompts, base)})
        except (ValueError, OSError) as error:
            if len(models) == 1:
                raise
            failed.append({"model": model, "error": str(error)})
            continue
        measured[number] = {**result, "verdict": judge(result)}
    results = list(measured.values())
    page = None
    if request.out is not None and results:
        names = {number: f"{number}/result.json" if len(models) > 1 else "result.json" for number in measured}
        page = _write({request.out / names[number]: result for number, result in measured.items()}, request.out)
    if as_json:
        shown = results[0] if len(models) == 1 else {"models": [*results, *failed]}
        typer.echo(json.dumps(shown, indent=2, allow_nan=False))
    else:
        _show(results, failed, page)
    return not failed


def _check_writable(out: Path) -> None:
    """Say now, and not after hours of measuring, that nothing can be written to the folder ``out``."""
    nearest = next(path for path in (out, *out.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise NotWritten(out, f"{nearest} is no folder that can be written to; name another with --out")


def _write(files: dict[Path, dict[str, Any]], out: Path) -> Path:
    """The results and their page; results of an earlier run, which the page does not show, go."""
    for path, result in files.items():
        write_json(path, result)
    for old in {out / "result.json", *out.glob("[1-9]*/result.json")} - set(files):
        old.unlink(missing_ok=True)
        if old.parent != out and not any(old.parent.iterdir()):
            old.parent.rmdir()
    return write_page(list(files.values()), out)


def _show(results: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], page: Path | None) -> None:
    if results:
        print_results(results, Console())
    for each in failed:
        typer.echo(f"{each['model']} could not be measured: {each['error']}")
    if page is not None:
        typer.echo(f"Page: {page.resolve().as_uri()}")
    elif results:
        typer.echo("Curves, attention maps and the figures as JSON: run again with --out DIR.")


def read_prompts(file: Path | None) -> tuple[str, ...]:
    """The prompts of a text file, one a line, empty lines left out; without a file, two that suit any image.

    Raises:
        ValueError: no such file, not UTF-8, or nothing in it.
    """
    if file is None:
        return DEFAULT_PROMPTS
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {file}: cannot be read as UTF-8 text ({type(error).__name__})") from error
    prompts = tuple(dict.fromkeys(line for line in lines if line))
    if not prompts:
        raise ValueError(f"--prompts {file}: the file is empty; write one prompt a line")
    return prompts


def base_text_norm(model: str) -> float:
    """T of a language model: a folder, a file or a hub model; only its embedding is read.

    Raises:
        ValueError, OSError: it cannot be read; the message says why.
    """
    embedding = find_embedding(model)
    return float(text_norm_statistics(embedding.row_norms(), embedding.width)["T"])


def short_names(models: Sequence[str]) -> list[str]:
    """What to call each model: the last part of its path or hub name, or as many as tell them apart."""
    parts = [Path(model).resolve().parts if Path(model).is_dir() else Path(model).parts for model in models]
    depth = 1
    while len({each[-depth:] for each in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(each[-depth:]) for each in parts]


def measure(
    model: str, request: Request, pictures: Pictures, prompts: Sequence[str], base: float | None = None
) -> dict[str, Any]:
    """Load one model and measure it with every prompt on every image, one sample at a time.

    Raises:
        ValueError: the model cannot be loaded or taken apart, or no image can be used.
    """
    folder = checkpoint_folder(model, trust_remote_code=request.trust_remote_code)
    loaded, processor = load_vlm(folder, trust_remote_code=request.trust_remote_code)
    measured = ModelProbe(find_anatomy(loaded, **dict(request.parts)))
    maps: list[dict[str, Any]] = []
    mapped: set[str] = set()
    refused: set[tuple[str, str]] = set()
    for path, image, prompt in _samples(pictures, prompts, model):
        try:
            inputs = inputs_of(processor, image, prompt)
        except ValueError as error:  # such as an aspect ratio that it does not take
            refused.add((path, str(error)))
            continue
        try:
            (look,) = measured.add(inputs)
        except (RuntimeError, TypeError, LookupError, AttributeError, AssertionError) as error:
            raise ValueError(f"{model}: its forward pass fails on {path}: {first_line(error)}") from error
        if prompt == prompts[0] and len(mapped) < MAPS:
            mapped.add(path)
            entry = map_entry(path, prompt, look, inputs, image, processor)
            maps += [] if entry is None else [entry]
    pictures.skipped.update(Counter(reason for _, reason in sorted(refused)))
    if not measured.samples:
        raise pictures.none_usable()
    result = measured.result(base)
    result["counts"]["skipped"] = dict(sorted(pictures.skipped.items()))
    return {**result, "maps": maps}


def _samples(pictures: Pictures, prompts: Sequence[str], model: str) -> Iterator[tuple[str, Any, str]]:
    """(path, image, prompt) of every pair, with a bar; each image is decoded once and held while it is asked about."""
    with tqdm(total=len(pictures) * len(prompts), desc=f"probe {Path(model).name}", unit="sample") as bar:
        for path, image in pictures:
            for prompt in prompts:
                yield path, image, prompt
                bar.update()
        bar.total = bar.n  # bad images are no samples
