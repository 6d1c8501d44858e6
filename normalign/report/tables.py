"""The report's tables of measurements, built from the metric files; a missing file leaves its cells empty."""

from collections.abc import Callable
from typing import Any

from normalign.report.blocks import MISSING, NOT_AVAILABLE, Table, interval, number, percent
from normalign.report.inputs import POINTS, ReportInputs, VariantInputs, dig

INTERFACES = {
    "vision_output": "vision output",
    "projector_output": "projector output",
    "aligner_output": "aligner output",
    "text_embeddings": "text embeddings",
}
SUMMARY_COLUMNS = ("Median", "Mean", "Std", "p5", "p95", "Sinks", "Mean without sinks")


def variants_table(inputs: ReportInputs) -> Table:
    """What each variant is."""
    rows = []
    for variant in inputs.variants:
        settings = variant.settings
        start = settings.init if settings.aligner == "layernorm" else MISSING
        gwc = ("on" if settings.gwc else "off") if settings.aligner == "layernorm" else MISSING
        target = MISSING if settings.intended_ratio is None else f"{settings.intended_ratio:g} × T"
        rows.append([variant.name, settings.aligner, start, gwc, target])
    return Table("Variants", ["Variant", "Aligner", "Initial gain", "GWC", "Target norm"], rows, "lllll")


def weights_table(inputs: ReportInputs) -> Table:
    """Where the weights come from."""
    rows = []
    for part, name in (("vision", "vision tower"), ("language", "language model")):
        entry = dig(inputs.weights, part)
        sha = dig(entry, "sha256")
        parameters = dig(entry, "parameters")
        rows.append(
            [
                name,
                source_name(dig(entry, "source")),
                str(dig(entry, "revision") or MISSING)[:12],
                str(dig(entry, "class") or MISSING),
                MISSING if parameters is None else f"{parameters:,}",
                f"{sha[:12]}…" if sha else MISSING,
            ]
        )
    columns = ["Part", "Source", "Revision", "Class", "Parameters", "SHA-256"]
    return Table("Weights", columns, rows, "llllrl")


def source_name(source: str | None) -> str:
    """A weight source to show; a local folder without its path, which says nothing to a reader."""
    if not source:
        return NOT_AVAILABLE
    scheme, _, name = source.partition(":")
    return f"{scheme}:{name.rstrip('/').rpartition('/')[2]}" if scheme == "folder" else source.rstrip(":")


def dataset_table(inputs: ReportInputs) -> Table:
    """Records read, kept and dropped, with the reasons."""
    rows = []
    for stage in ("stage1", "stage2"):
        entry = dig(inputs.dataset, stage)
        counts = [f"{value:,}" if value is not None else MISSING for value in _values(entry, COUNTS)]
        reasons = dig(entry, "dropped_by_reason") or {}
        text = "; ".join(f"{reason}: {dig(item, 'count')}" for reason, item in reasons.items())
        rows.append([stage, *counts, text or MISSING])
    benchmarks = dig(inputs.dataset, "benchmarks") or {}
    note = "Benchmark items: " + (", ".join(f"{name} {count}" for name, count in benchmarks.items()) or NOT_AVAILABLE)
    columns = ["Data", "Read", "Kept", "Dropped", "Turns", "Reasons for dropping"]
    return Table("Data", columns, rows, "lrrrrl", note + ".")


COUNTS = ("read", "kept", "dropped", "turns")


def interface_table(inputs: ReportInputs) -> Table:
    """L2 norms at every interface, per variant and point."""
    rows = []
    for variant, point, label in _points(inputs):
        for key, name in INTERFACES.items():
            summary = dig(variant.probe, "points", point, "interface", key)
            rows.append([variant.name, label, name, *summary_cells(summary)])
    columns = ["Variant", "Point", "Interface", *SUMMARY_COLUMNS]
    note = "L2 norm per token. Sinks: tokens of outlying norm, count and share of all tokens."
    return Table("Norms at every interface", columns, rows, "lllrrrrrrr", note)


def ratio_table(inputs: ReportInputs) -> Table:
    """Ratio to T and k, per variant and point."""

    def cells(variant: VariantInputs, point: str) -> list[str]:
        values = _values(dig(variant.probe, "points", point), ("ratio", "k_in_context"))
        return [number(value) for value in values]

    note = (
        "Ratio: mean visual norm where image and text meet, divided by T. k: the same norm divided by "
        "the mean norm "
        "of the text tokens that the prompts really contain. 1 means balance."
    )
    return _per_point(inputs, "Balance at the language model's input", ["Ratio to T", "k in context"], cells, note)


def sync_gap_table(inputs: ReportInputs) -> Table:
    """Sync gap over all layers and over the first eight."""

    def cells(variant: VariantInputs, point: str) -> list[str]:
        gap = dig(variant.probe, "points", point, "sync_gap")
        return [number(value) for value in _values(gap, ("all", "first8"))]

    note = "Mean over layers of |cosine of visual − cosine of text tokens|; 0 means both turn at the same rate."
    return _per_point(inputs, "Distance of visual and text cosine", ["All layers", "First 8 layers"], cells, note)


def encoder_table(inputs: ReportInputs) -> Table:
    """Norms of the vision tower's hidden states, layer by layer; the one the projector reads is marked."""
    data = inputs.encoder_norm
    layers = dig(data, "layers") or []
    rows = [[f"hidden state {index}", *summary_cells(summary)] for index, summary in enumerate(layers)]
    rows.append(["after the final norm", *summary_cells(dig(data, "after_final_norm"))])
    rows.append(["read by the projector", *summary_cells(dig(data, "selected"))])
    columns = ["Where", *SUMMARY_COLUMNS]
    note = (
        f"{dig(data, 'images') or MISSING} images of {dig(data, 'tokens_per_image') or MISSING} tokens. "
        f"{feature_sentence(inputs)} Its mean is {number(dig(data, 'ratio_to_T'))} × T."
    )
    return Table("Vision tower, layer by layer", columns, rows, "lrrrrrrr", note)


def feature_sentence(inputs: ReportInputs) -> str:
    """Which hidden state the projector reads, because that choice decides k."""
    layer, norm = dig(inputs.encoder_norm, "feature_layer"), dig(inputs.encoder_norm, "feature_norm")
    if layer is None:
        return f"The layer that the projector reads is {NOT_AVAILABLE}."
    applied = "with" if norm else "without"
    return f"The projector reads hidden state {layer} (feature_layer) {applied} the final norm (feature_norm)."


def text_norm_table(inputs: ReportInputs) -> Table:
    """T and its distribution."""
    data = inputs.text_norm
    percentiles = dig(data, "percentiles") or {}
    names = [
        "T (mean)",
        "Median",
        "Std",
        *(f"p{p}" for p in percentiles),
        "Initial gain T/√D",
        "Rows",
        "Zero rows",
    ]
    values = [number(value) for value in _values(data, ("T", "median", "std"))]
    values += [number(value) for value in percentiles.values()]
    values.append(number(dig(data, "g_init")))
    values += [f"{v:,}" if v is not None else MISSING for v in _values(data, ("rows", "zero_rows"))]
    note = "L2 norm of the non-zero rows of the language model's input embedding."
    return Table("Text embeddings", names, [values], "r" * len(names), note)


def benchmark_table(inputs: ReportInputs) -> Table:
    """Accuracy ± se, chance and shuffled control per task and variant; text beside the original."""
    rows = []
    for task in _tasks(inputs):
        for variant in inputs.variants:
            entry = dig(variant.evaluation, "tasks", task)
            rows.append([task, variant.name, *_task_cells(entry)])
        reference = dig(inputs.language_reference, "tasks", task)
        if reference is not None:
            rows.append([task, "untouched language model", *_task_cells(reference)])
    for variant in inputs.variants:
        rows.append(["all visual tasks", variant.name, *_pooled_cells(dig(variant.evaluation, "pooled_visual"))])
    columns = ["Task", "Model", "Accuracy ± se", "Chance", "Shuffled", "Matched − shuffled (95 % interval)"]
    columns += ["Items", "Images"]
    note = (
        "Shuffled: accuracy on the same questions with another item's image; a model that looks "
        "at the image "
        "loses accuracy there. These are this run's own benchmarks; the papers' figures stand in their "
        "own table."
    )
    return Table("Accuracy in per cent", columns, rows, "llrrrrrr", note)


def kinds_table(inputs: ReportInputs) -> Table:
    """Accuracy per kind of question."""
    kinds: dict[tuple[str, str], int] = {}
    for variant in inputs.variants:
        for task, entry in (dig(variant.evaluation, "tasks") or {}).items():
            for kind, item in (entry.get("kinds") or {}).items():
                kinds.setdefault((task, kind), item["items"])
    rows = []
    for (task, kind), items in kinds.items():
        paths = [dig(v.evaluation, "tasks", task, "kinds", kind, "accuracy") for v in inputs.variants]
        rows.append([task, kind, *(percent(value) for value in paths), str(items)])
    names = [variant.name for variant in inputs.variants]
    title = "Accuracy per kind of question (per cent)"
    return Table(title, ["Task", "Kind", *names, "Items"], rows, "ll" + "r" * (len(names) + 1))


def verdict_rows(inputs: ReportInputs) -> list[dict[str, Any]]:
    """Every verdict of the run, failed ones first, else in the order of the checks."""
    checks = [inputs.check_data, *(variant.check for variant in inputs.variants)]
    verdicts = [verdict for check in checks for verdict in dig(check, "verdicts") or []]
    return sorted(verdicts, key=lambda verdict: bool(verdict["passed"]))


def verdict_table(inputs: ReportInputs) -> Table:
    """All expectations with the observed value and the bounds."""
    verdicts = verdict_rows(inputs)
    rows = [
        [
            "passed" if verdict["passed"] else "FAILED",
            str(verdict["variant"]),
            str(verdict["expectation"]),
            str(verdict.get("point") or MISSING),
            observed_text(verdict.get("observed")),
            bounds_text(verdict),
            str(verdict.get("message") or ""),
        ]
        for verdict in verdicts
    ]
    columns = ["Verdict", "Variant", "Expectation", "Point", "Observed", "Bound", "Message"]
    missing = [v.name for v in inputs.variants if v.check is None] + ["data"] * (inputs.check_data is None)
    note = f"Not available for: {', '.join(missing)}." if missing else ""
    failed = frozenset(index for index, verdict in enumerate(verdicts) if not verdict["passed"])
    return Table("Expectations", columns, rows, "llllrll", note, failed)


def observed_text(observed: Any) -> str:
    """The observed value of a verdict, a number or a word."""
    if isinstance(observed, bool) or not isinstance(observed, int | float):
        return MISSING if observed is None else str(observed)
    return f"{observed:,}" if isinstance(observed, int) else number(observed)


def bounds_text(verdict: dict[str, Any]) -> str:
    """The range that a verdict allows."""
    low, high = verdict.get("low"), verdict.get("high")
    if low is None and high is None:
        return MISSING
    if low is None or high is None:
        return f"≥ {low:g}" if high is None else f"≤ {high:g}"
    return f"{low:g} to {high:g}"


def _per_point(
    inputs: ReportInputs,
    title: str,
    columns: list[str],
    cells: Callable[[VariantInputs, str], list[str]],
    note: str,
) -> Table:
    rows = [[variant.name, label, *cells(variant, point)] for variant, point, label in _points(inputs)]
    return Table(title, ["Variant", "Point", *columns], rows, "ll" + "r" * len(columns), note)


def _points(inputs: ReportInputs) -> list[tuple[VariantInputs, str, str]]:
    return [(variant, point, label) for variant in inputs.variants for point, label in POINTS.items()]


def _tasks(inputs: ReportInputs) -> list[str]:
    """Task names, visual ones first; known from any variant's evaluation."""
    kinds: dict[str, str] = {}
    for variant in inputs.variants:
        for task, entry in (dig(variant.evaluation, "tasks") or {}).items():
            kinds.setdefault(task, entry.get("kind") or "")
    for task in dig(inputs.language_reference, "tasks") or {}:
        kinds.setdefault(task, "text")
    return sorted(kinds, key=lambda task: kinds[task] == "text")


def _task_cells(entry: dict[str, Any] | None) -> list[str]:
    accuracy, gap = dig(entry, "accuracy"), dig(entry, "matched_minus_shuffled")
    difference = dig(gap, "difference")
    return [
        NOT_AVAILABLE if accuracy is None else f"{percent(accuracy)} ± {percent(dig(entry, 'stderr'))}",
        percent(dig(entry, "chance")),
        percent(dig(entry, "shuffled", "accuracy")),
        MISSING if difference is None else f"{percent(difference, True)} ({interval(gap['low'], gap['high'])})",
        *(str(dig(entry, key) or MISSING) for key in ("items", "images")),
    ]


def _pooled_cells(pooled: dict[str, Any] | None) -> list[str]:
    """The pooled entry keeps the control's figures flat; everything else reads as a task's."""
    entry = dict(pooled or {})
    entry["shuffled"] = {"accuracy": entry.get("shuffled_accuracy")}
    entry["matched_minus_shuffled"] = {key: entry.get(key) for key in ("difference", "low", "high")}
    return _task_cells(entry)


def summary_cells(summary: dict[str, Any] | None) -> list[str]:
    """Median, mean, std, p5, p95, sinks and mean without sinks of a norm summary."""
    cells = [number(value) for value in _values(summary, ("median", "mean", "std", "p5", "p95"))]
    count, share = dig(summary, "sinks", "count"), dig(summary, "sinks", "share")
    sinks = MISSING if count is None else f"{count:,} ({percent(share)} %)"
    return [*cells, sinks, number(dig(summary, "mean_without_sinks"))]


def _values(source: Any, keys: tuple[str, ...]) -> list[Any]:
    return [dig(source, key) for key in keys]
