"""Stage ``text_norm``: T, the mean norm of the language model's text embeddings."""

from components import stage_main
from normalign.embeddings.source import local_embedding
from normalign.embeddings.statistics import text_norm_statistics
from normalign.files import write_json
from normalign.metrics import rounded
from normalign.settings import Profile


def run(profile: Profile) -> str:
    """Read the embedding tensor alone, never the model, and write ``text_norm.json``."""
    embedding = local_embedding(profile.folder / "weights" / "language")
    statistics = text_norm_statistics(embedding.row_norms(), embedding.width)
    write_json(profile.folder / "text_norm.json", rounded(statistics))
    return (
        f"text_norm: T = {statistics['T']:.4f} (std {statistics['std']:.3f}, {statistics['zero_rows']} zero rows of "
        f"{statistics['rows']}), initial gain T/√D = {statistics['g_init']:.4f}"
    )


if __name__ == "__main__":
    stage_main(run)
