"""The report's sections, and their rendering as one HTML page and as Markdown."""

from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normalign.report.accuracy import SEEDS, comparison_table, text_comparisons, visual_comparisons
from normalign.report.blocks import NOT_AVAILABLE, Chart, Gallery, Section, Table, Text, markdown_section
from normalign.report.charts import Measure, encoder_chart, layer_chart, training_chart
from normalign.report.headline import accuracy_verdict, failures, headline
from normalign.report.inputs import ReportInputs
from normalign.report.maps import attention_gallery
from normalign.report.paper import paper_table
from normalign.report.tables import (
    benchmark_table,
    dataset_table,
    encoder_table,
    feature_sentence,
    interface_table,
    kinds_table,
    ratio_table,
    sync_gap_table,
    text_norm_table,
    variants_table,
    verdict_table,
    weights_table,
)
from normalign.report.words import (
    CURVES_CAPTION,
    DEFINITIONS,
    GAIN_CAPTION,
    GRADIENTS_CAPTION,
    MAPS_CAPTION,
    MASS_CAPTION,
    RANK_CAPTION,
    SHARES_CAPTION,
    STEPS_CAPTION,
    TRAINING_CAPTION,
    UPDATES_CAPTION,
)

NORM_AND_COSINE = (
    Measure("norm_median", "Median L2 norm", log=True),
    Measure("cosine", "Inter-layer cosine"),
)
UPDATES = (
    Measure("relative_update_attention", "Relative update, attention", log=True),
    Measure("relative_update_mlp", "Relative update, MLP", log=True),
)
RANK = (Measure("effective_rank", "Effective rank", log=True),)
MASS = (Measure("mass", "Attention mass, text → image", single=True),)
TRAINING = (
    ("loss", "Loss", False),
    ("clip_factor", "Clip factor", False),
)
MODULE_NAMES = {
    "vision": "vision tower",
    "projector": "projector",
    "aligner": "aligner",
    "language": "language model",
}
GRADIENTS = tuple((f"grad_{module}", f"Gradient norm, {name}", True) for module, name in MODULE_NAMES.items())
SHARES = tuple((f"clip_share_{module}", f"Clip budget, {name}", False) for module, name in MODULE_NAMES.items())
WEIGHT_UPDATES = tuple((f"update_{module}", f"Update, {name}", True) for module, name in MODULE_NAMES.items())
GAIN = (
    ("gain_l2", "Gain, L2 norm", False),
    ("gain_mean_abs", "Gain, mean |g|", False),
    ("gain_drift", "Gain, drift from its start", False),
)


def report_sections(inputs: ReportInputs) -> list[Section]:
    """Everything the report shows, in order."""
    return [_summary(inputs), *_measurements(inputs), *_outcomes(inputs), _definitions()]


def curves_svg(sections: list[Section]) -> str:
    """Layer-wise norm and cosine of all variants on shared axes, as a free-standing SVG document."""
    blocks = next(section.blocks for section in sections if section.anchor == "layers")
    curves = next(block for block in blocks if isinstance(block, Chart))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + curves.svg


def render_markdown(inputs: ReportInputs, sections: list[Section]) -> str:
    """The sections' texts and tables as Markdown, with the layer-wise curves as a picture beside it."""
    parts = [f"# {_title(inputs)}"]
    for section in sections:
        parts.append(markdown_section(section))
        if section.anchor == "layers":
            parts.append("![Layer-wise norm and cosine of all variants](curves.svg)")
    return "\n\n".join(parts) + "\n"


def render_html(inputs: ReportInputs, sections: list[Section]) -> str:
    """The pipeline's report as one page."""
    return render_page(_title(inputs), sections)


def render_page(title: str, sections: list[Section]) -> str:
    """One page without scripts or links to elsewhere; every text is escaped, only our own SVG is not."""
    environment = Environment(
        loader=PackageLoader("normalign.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (resources.files("normalign.report") / "page.css").read_text(encoding="utf-8")
    template = environment.get_template("page.html.j2")
    return template.render(title=title, style=Markup(style), sections=sections, svg=Markup) + "\n"


def _title(inputs: ReportInputs) -> str:
    return f"Norm alignment, profile {inputs.profile}"


def _summary(inputs: ReportInputs) -> Section:
    failed = failures(inputs)
    blocks: list[Text | Table | Chart | Gallery] = [Text(headline(inputs))]
    if failed:
        blocks.append(Text(failed, bullets=True))
    blocks += [variants_table(inputs), weights_table(inputs), dataset_table(inputs)]
    return Section("summary", "What was run", blocks)


def _measurements(inputs: ReportInputs) -> list[Section]:
    note = "Difference in percentage points. Interval per comparison, p-value adjusted over the variants (Holm)."
    tables = [
        comparison_table("Pooled visual accuracy, paired over items, clustered by image", visual, note)
        for visual in [visual_comparisons(inputs)]
        if visual
    ]
    text = text_comparisons(inputs)
    if text:
        unpaired = "Unpaired: of the untouched language model only the accuracy and its standard error are kept."
        tables.append(comparison_table("Text accuracy", text, f"{note} {unpaired}"))
    verdict = [line for line in accuracy_verdict(inputs) if line != SEEDS]
    layers = [
        Chart("Norm and cosine", layer_chart(inputs, "curves", NORM_AND_COSINE), CURVES_CAPTION),
        Chart("Relative updates", layer_chart(inputs, "updates", UPDATES), UPDATES_CAPTION),
        Chart("Effective rank", layer_chart(inputs, "rank", RANK), RANK_CAPTION),
        Chart("Attention mass", layer_chart(inputs, "mass", MASS), MASS_CAPTION),
    ]
    return [
        Section("accuracy", "Does the aligner change accuracy?", [Text(verdict, True), Text([SEEDS]), *tables]),
        Section("norms", "Norms at the interfaces", [ratio_table(inputs), interface_table(inputs)]),
        Section("layers", "Layer by layer", layers),
        Section("sync", "Sync gap", [sync_gap_table(inputs)]),
        Section(
            "training",
            "Training",
            [
                Chart("Loss and clipping", training_chart(inputs, "training", TRAINING), TRAINING_CAPTION),
                Chart("Gradient norms", training_chart(inputs, "gradients", GRADIENTS), GRADIENTS_CAPTION),
                Chart("Share of the clip budget", training_chart(inputs, "shares", SHARES), SHARES_CAPTION),
                Chart("Update per step", training_chart(inputs, "weight_updates", WEIGHT_UPDATES), STEPS_CAPTION),
                Chart("Gain of the aligner", training_chart(inputs, "gain", GAIN), GAIN_CAPTION),
            ],
        ),
        Section(
            "encoder",
            "Vision tower and text embeddings",
            [
                Chart("Vision tower", encoder_chart(inputs, "encoder"), feature_sentence(inputs)),
                encoder_table(inputs),
                text_norm_table(inputs),
            ],
        ),
    ]


def _outcomes(inputs: ReportInputs) -> list[Section]:
    gallery = attention_gallery(inputs)
    maps: list[Text | Table | Chart | Gallery]
    maps = [Text([MAPS_CAPTION]), gallery] if gallery.items else [Text([f"Attention maps: {NOT_AVAILABLE}."])]
    return [
        Section("benchmarks", "Benchmarks", [benchmark_table(inputs), kinds_table(inputs)]),
        Section("maps", "Where the text looks", maps),
        Section("expectations", "Expectations", [verdict_table(inputs)]),
        Section("papers", "The papers' figures", [paper_table(inputs)]),
    ]


def _definitions() -> Section:
    return Section("reading", "How to read this page", [Text(DEFINITIONS, bullets=True)])
