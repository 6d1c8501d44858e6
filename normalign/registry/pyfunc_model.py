"""The code that MLflow stores with a registered version and runs to load it (models from code)."""

import base64
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 100_000_000  # checked before decoding


class VisionLanguageModel(PythonModel):
    """Answers questions about images, greedily.

    Input: a frame with columns ``question`` and ``image``, which holds the path of an image file, the file's
    bytes in base64, or nothing for a question on its own. Output: one answer per row.
    """

    def load_context(self, context: PythonModelContext) -> None:
        from normalign.vlm.checkpoint import load

        self.model, self.processor = load(Path(context.artifacts["model"]))

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[str]:
        from normalign.vlm.generate import answer

        return [
            answer(self.model, self.processor, open_image(row.get("image")), str(row["question"]))
            for row in model_input.to_dict(orient="records")
        ]


def open_image(value: Any) -> "Image.Image | None":
    """The image that a path or base64 text stands for, decoded as in training; None for an empty value.

    Raises:
        ValueError: it is neither, or the image cannot be used.
    """
    from normalign.data.images import open_image as decode

    if not isinstance(value, str) or not value:
        return None
    # A file's name is short, base64 of an image is not, and the operating system refuses over-long names.
    if len(value) < 1024 and Path(value).is_file():
        return decode(Path(value).name, Path(value).parent, MAX_PIXELS)
    try:
        content = base64.b64decode(value, validate=True)
    except ValueError:
        raise ValueError(f"column 'image': {value[:60]!r} is neither the path of a file nor base64") from None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "image").write_bytes(content)
        return decode("image", Path(folder), MAX_PIXELS)


set_model(VisionLanguageModel())
