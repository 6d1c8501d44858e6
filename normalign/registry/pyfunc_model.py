"""The code that MLflow stores with a registered version and runs to load it (models from code)."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

if TYPE_CHECKING:
    from PIL import Image


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
    """The image that a path or base64 text stands for; None for an empty value.

    Raises:
        ValueError: it is neither.
    """
    from PIL import Image, UnidentifiedImageError

    if not isinstance(value, str) or not value:
        return None
    # A file's name is short, base64 of an image is not, and the operating system refuses over-long names.
    if len(value) < 1024 and Path(value).is_file():
        return Image.open(value).convert("RGB")
    try:
        return Image.open(io.BytesIO(base64.b64decode(value, validate=True))).convert("RGB")
    except (ValueError, UnidentifiedImageError):
        raise ValueError(
            f"column 'image': {value[:60]!r} is neither the path of an image file nor an image in base64"
        ) from None


set_model(VisionLanguageModel())
