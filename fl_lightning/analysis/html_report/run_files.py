"""Read the files of a run that an HTML report shows.

Symbolic links and files above a size limit are refused. Large images are scaled down.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from fl_lightning.core.errors import one_line, reason_of
from fl_lightning.core.files import path_below, read_file
from fl_lightning.runs.reader import Run

MOST_IMAGE_BYTES = 20_000_000
MOST_PIXELS = 25_000_000
"""Limits above which an image is not opened."""
IMAGE_BYTES, IMAGES_BYTES = 150_000, 2_000_000
"""Maximum size of one image and of all images. Larger images are reduced."""
SIDES = (1400, 1000, 700)
"""Lengths in pixels of the longer side, tried in turn to reduce a large image."""
IMAGE_NAME = re.compile(r"round-([0-9]{1,9})\.png")
"""Matches the file name of a round's image."""


def read_or_skip(left_out: list[str], name: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """Call `read` on the arguments, and return its result; None for a missing or invalid file.

    A message about an invalid file is appended to `left_out`.
    """
    try:
        return read(*arguments)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        left_out.append(f"{name}: {reason_of(error)}")
        return None


# --- images ---


def last_images(runs: Sequence[Run], run_names: Sequence[str], left_out: list[str]) -> list[dict[str, Any]]:
    """Return the latest image in each subfolder of the runs' `figures/` as JSON data, up to the page's size limit.

    Args:
        runs: The runs.
        run_names: Their names in messages.
        left_out: Messages about images that are not shown are appended to it.
    """
    shown, size = [], 0
    for i, (run, run_name) in enumerate(zip(runs, run_names, strict=True)):
        for figure, file in read_or_skip(left_out, f"{run_name}/figures", image_files, run.run_dir) or []:
            path = f"{run_name}/figures/{figure}/{file}"
            image = read_or_skip(left_out, path, embed_image, run, figure, file)
            if image and size + len(image["source"]) > IMAGES_BYTES:
                left_out.append(f"{path}: earlier images fill the page")
            elif image:
                size += len(image["source"])
                shown.append({"run": i, "name": figure, "round": round_of(file), **image})
    return shown


def image_files(folder: Path) -> list[tuple[str, str]]:
    """Return the latest image in each subfolder of a run's `figures/`, as pairs of subfolder name and file name."""
    found = []
    for kind in sorted((folder / "figures").iterdir()):
        names = [path.name for path in kind.iterdir()] if kind.is_dir() else []
        if images := [name for name in names if IMAGE_NAME.fullmatch(name)]:
            found.append((kind.name, max(images, key=round_of)))
    return found


def round_of(file: str) -> int:
    """Return the round of an image, such as 7 for `round-7.png`."""
    match = IMAGE_NAME.fullmatch(file)
    assert match
    return int(match[1])


def embed_image(run: Run, name: str, file: str) -> dict[str, Any]:
    """Return an image of a run as a data URL (`source`), and whether the image had to be made smaller (`reduced`).

    Args:
        run: The run.
        name: The image's subfolder in `figures/`.
        file: The image's file name.

    Raises:
        OSError: The file cannot be read, or is too large.
        ValueError: The file is not a PNG image, or has too many pixels.
    """
    content = read_file(path_below(run.run_dir, Path("figures", name, file)), MOST_IMAGE_BYTES)
    try:
        image = Image.open(io.BytesIO(content), formats=["PNG"])
        if image.width * image.height > MOST_PIXELS:
            raise Image.DecompressionBombError
        image.load()
    except UnidentifiedImageError as error:
        raise ValueError("it is not a PNG image") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels") from error
    except Exception as error:  # Pillow raises many kinds of errors for damaged images
        raise ValueError(f"it is damaged: {one_line(error)}") from error
    small = content if len(content) <= IMAGE_BYTES else reduce_image(image)
    return {"source": f"data:image/png;base64,{base64.b64encode(small).decode()}", "reduced": small is not content}


def reduce_image(image: Image.Image) -> bytes:
    """Return an image as PNG data, with fewer pixels and 128 colours to save space.

    Raises:
        ValueError: The reduced image is still too large.
    """
    for side in SIDES:
        image = image.convert("RGB")
        image.thumbnail((side, side))
        reduced = image.quantize(128, method=Image.Quantize.FASTOCTREE)  # the default takes seconds
        reduced.save(content := io.BytesIO(), format="PNG", optimize=True)
        if content.tell() <= IMAGE_BYTES:
            return content.getvalue()
    raise ValueError(f"it takes more than {IMAGE_BYTES:,} bytes even if reduced")
