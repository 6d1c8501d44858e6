"""The images of a folder, for the commands that take `--images DIR`."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from normalign.data.images import ImageRejected, open_image

MAX_PIXELS = 100_000_000  # 300 MB decoded


class Pictures:
    """The images below ``folder``, in the order of their paths, one decoded at a time; bad ones are counted.

    ``skipped`` says, once they were gone through, how many files were left out for which reason.

    Raises:
        ValueError: there is no such folder, or no file in it.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"--images {folder}: there is no such folder")
        self.folder = folder
        inside = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        self.paths = sorted(str(path) for path in inside if not any(part.startswith(".") for part in path.parts))
        if not self.paths:
            raise ValueError(f"--images {folder}: the folder is empty; put the images to measure on into it")
        self.skipped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[tuple[str, Image.Image]]:
        """(path below the folder, 8-bit RGB image) of each file that is a usable image."""
        self.skipped.clear()
        for path in self.paths:
            try:
                yield path, open_image(path, self.folder, MAX_PIXELS)
            except ImageRejected as rejected:
                self.skipped[rejected.reason] += 1

    def none_usable(self) -> ValueError:
        """The error to raise where not one image could be measured."""
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.skipped.items()))
        return ValueError(f"--images {self.folder}: none of its {len(self)} files is a usable image ({reasons})")
