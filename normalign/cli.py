"""The `normalign` command. Each command imports what it needs when it is called, so that `--help` is quick."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

_HELP = (
    "Measure and mend norm imbalance in vision-language models; follow the pipeline that trains and compares variants."
)
app = typer.Typer(name="normalign", no_args_is_help=True, add_completion=False, help=_HELP)
profile_app = typer.Typer(no_args_is_help=True, help="Which profile of params.yaml the pipeline runs.")
app.add_typer(profile_app, name="profile")
_RESULTS = typer.Argument(None, help="Results of probe, text-norm or encoder-norm, as JSON.")
_PROFILE = typer.Option(None, help="Profile to show; default: the one in params.yaml.")
_VISION_CONFIG = typer.Option(None, help="config.json of the vision tower.")
_VLMS = typer.Argument(metavar="MODEL...", help="Folders of vision-language models, or hub names.")
_IMAGES = typer.Option(help="Folder of images.")
_PROMPTS = typer.Option(None, help="Text file, one prompt a line; default: two that suit any image.")
_PAGE = typer.Option(None, help="Folder for the page and result.json.")
_MODEL = typer.Argument(help="Folder of a vision-language model: config.json, safetensors, processor.")
_ATTACHED = typer.Argument(help="Folder that `normalign attach` wrote, or what was trained from it.")
_OUT = typer.Argument(help="New folder for what is written.")
_CALIBRATION = typer.Option(None, "--images", help="Folder of pictures that global_scale's factor is measured on.")
_LANGUAGE_CONFIG = typer.Option(None, help="config.json of the language model.")
_MODELS = typer.Argument(
    metavar="MODEL...", help="Folders, .safetensors or .gguf files, hub models org/name[@revision]."
)
_PROJECTOR = typer.Option(None, help="Dotted path of the projector, where it is not found.")
_TOWER = typer.Option(None, help="Dotted path of the vision tower, where it is not found.")
_LANGUAGE = typer.Option(None, help="Dotted path of the text decoder, where it is not found.")
_IMAGE_TOKEN = typer.Option(None, help="Id of the image placeholder, where it is not found.")
_TRUST = typer.Option(False, "--trust-remote-code", help="Run code that comes with the checkpoint.")
_AS_JSON = typer.Option(False, "--json", help="One JSON object instead of text.")


@contextmanager
def _told() -> Iterator[None]:
    """Print an error that a person can mend as one line, without a traceback."""
    try:
        yield
    except BrokenPipeError:  # `normalign report | head`: typer ends quietly
        raise
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


@profile_app.command("use")
def profile_use(name: str = typer.Argument(help="A profile of params.yaml.")) -> None:
    """Make NAME the profile that `make repro` runs."""
    from normalign.commands import profile

    with _told():
        before = profile.use(name)
    typer.echo(f"params.yaml: profile {before} -> {name}")


@app.command()
def report(profile: str | None = _PROFILE) -> None:
    """Print the report's tables and say where its page is."""
    from normalign.commands.report import report

    with _told():
        report(profile)


@app.command()
def tables(
    results: list[Path] | None = _RESULTS,
    as_json: bool = _AS_JSON,
) -> None:
    """Print the paper's tables RQ1 to RQ4, its figures beside what was measured here."""
    from normalign.commands.tables import tables

    with _told():
        tables(results or [], as_json=as_json)


@app.command()
def compare(profile: str | None = _PROFILE) -> None:
    """Print the registered versions of a profile side by side."""
    from normalign.commands.compare import compare

    with _told():
        compare(profile)


@app.command("text-norm")
def text_norm(
    models: list[str] = _MODELS,
    as_json: bool = _AS_JSON,
) -> None:
    """T, the mean norm of the text embeddings, of language models or VLMs; reads the embedding tensors alone."""
    from normalign.commands.text_norm import text_norm

    if not text_norm(models, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def plan(
    profile: str | None = typer.Argument(None, help="A profile of params.yaml; default: the one it picks."),
    mfu: float = typer.Option(0.4, help="Share of the peak that is reached."),
    peak_tflops: float | None = typer.Option(
        None, help="Peak of one device; default: an H100's in bf16, or 0.1 a core."
    ),
    devices: int | None = typer.Option(None, help="Default: the profile's compute.min_devices."),
    samples: tuple[int, int] | None = typer.Option(None, help="Samples of stage 1 and of stage 2."),
    text_tokens: tuple[int, int] | None = typer.Option(None, help="Text tokens of a sample, per stage."),
    supervised_tokens: tuple[int, int] | None = typer.Option(None, help="How many of these are supervised, per stage."),
    vision_config: Path | None = _VISION_CONFIG,
    language_config: Path | None = _LANGUAGE_CONFIG,
    as_json: bool = _AS_JSON,
) -> None:
    """Estimate a profile's time and memory from its models' dimensions, before anything is run."""
    from normalign.commands.plan import plan
    from normalign.plan.estimate import Question

    with _told():
        question = Question(
            mfu,
            peak_tflops,
            devices,
            samples,
            text_tokens,
            supervised_tokens,
            vision_config,
            language_config,
        )
        plan(profile, question, as_json=as_json)


@app.command()
def probe(
    models: list[str] = _VLMS,
    images: Path = _IMAGES,
    prompts: Path | None = _PROMPTS,
    base: str | None = typer.Option(None, help="The language model that MODEL was made from, as `text-norm` takes it."),
    out: Path | None = _PAGE,
    projector: str | None = _PROJECTOR,
    tower: str | None = _TOWER,
    language: str | None = _LANGUAGE,
    image_token_id: int | None = _IMAGE_TOKEN,
    trust_remote_code: bool = _TRUST,
    as_json: bool = _AS_JSON,
) -> None:
    """Measure norms, angles and attention of a vision-language model, layer by layer, and say what is wrong."""
    with _told():
        from normalign.commands.probe import Request, probe

        parts = {"projector": projector, "tower": tower, "language": language, "image_token_id": image_token_id}
        request = Request(images, prompts, base, out, trust_remote_code, tuple(parts.items()))
        complete = probe(models, request, as_json=as_json)
    if not complete:
        raise typer.Exit(1)


@app.command("encoder-norm")
def encoder_norm(
    encoders: list[Path] = typer.Argument(help="Folders of vision towers, or of whole models that hold one."),  # noqa: B008
    images: Path = typer.Option(help="Folder of images to measure on."),  # noqa: B008
    as_json: bool = _AS_JSON,
    trust_remote_code: bool = _TRUST,
) -> None:
    """Measure the norms of vision towers' tokens, layer by layer, before and after the final norm."""
    from normalign.commands.encoder_norm import encoder_norm

    with _told():
        complete = encoder_norm(encoders, images, as_json=as_json, trust_remote_code=trust_remote_code)
    if not complete:
        raise typer.Exit(1)


@app.command()
def attach(
    model: Path = _MODEL,
    out: Path = _OUT,
    aligner: str = typer.Option("layernorm", help="layernorm, global_scale or token_rms."),
    gwc: bool = typer.Option(False, "--gwc", help="Compensate the gradient for a small gain (layernorm)."),
    multiple: float = typer.Option(1.0, help="Target norm over T, the text embeddings' mean norm."),
    images: Path | None = _CALIBRATION,
    trust_remote_code: bool = _TRUST,
    projector: str | None = _PROJECTOR,
    tower: str | None = _TOWER,
    language: str | None = _LANGUAGE,
    image_token_id: int | None = _IMAGE_TOKEN,
    as_json: bool = _AS_JSON,
) -> None:
    """Put an aligner behind a model's projector; then train it. Needs 4 bytes of memory a parameter, global_scale 8."""
    from normalign.commands.attach import attach

    with _told():
        attach(
            model,
            out,
            aligner=aligner,
            gwc=gwc,
            multiple=multiple,
            images=images,
            trust_remote_code=trust_remote_code,
            projector=projector,
            tower=tower,
            language=language,
            image_token_id=image_token_id,
            as_json=as_json,
        )


@app.command()
def detach(
    attached: Path = _ATTACHED,
    out: Path = _OUT,
    restore_projector: bool = typer.Option(
        False, "--restore-projector", help="The projector from before attach, in the place of the trained one."
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Take an attached aligner out again: the original bit by bit, or, once trained, what was trained."""
    from normalign.commands.attach import detach

    with _told():
        detach(attached, out, restore_projector=restore_projector, as_json=as_json)


if __name__ == "__main__":
    app()
