"""Stage `report`: one self-contained page, the same tables as Markdown, and the layer-wise curves."""

from pathlib import Path

from components import stage_main
from normalign.files import write_text
from normalign.report.inputs import load_inputs
from normalign.report.page import curves_svg, render_html, render_markdown, report_sections
from normalign.settings import PARAMS_FILE, Profile, variants_to_run


def run(profile: Profile, root: Path = Path()) -> str:
    """Write index.html, report.md and curves.svg of ``profile`` below ``root``, the project's folder."""
    variants = variants_to_run(root / PARAMS_FILE)
    inputs = load_inputs(profile, variants, root)
    sections = report_sections(inputs)
    folder = root / profile.folder / "report"
    write_text(folder / "index.html", render_html(inputs, sections))
    write_text(folder / "report.md", render_markdown(inputs, sections))
    write_text(folder / "curves.svg", curves_svg(sections))
    return f"report on {len(variants)} variants: {profile.folder / 'report' / 'index.html'}"


if __name__ == "__main__":
    stage_main(run)
