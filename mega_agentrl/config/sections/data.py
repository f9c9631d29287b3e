"""Settings of the training and validation prompts (`data.*`), and their file lists.

`data.train` and `data.validation` are a path or a list of paths, each as `path` or `path@weight`:

    data.train=a.parquet
    data.train=[a.parquet,b.jsonl@0.5,hf://datasets/me/set@main/c.parquet@2]

`@` needs no quotes in Hydra or a shell. Only a number at the very end is a weight; append `@1` to a
file whose own name ends in `@` and a number. A path with a scheme (`s3://`) is read by fsspec
through a copy in the local cache; `file://` caches a file of a slow local disk. This module reads
no files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from mega_agentrl.config.enums import PromptOrder, Truncation
from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.ranges import MAX_TOKENS, Range, Section

_CLASS_PATH_RE = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*")
_WEIGHT_RE = re.compile(r"(.+)@(\d+(?:\.\d*)?|\.\d+)", re.DOTALL)
MAX_IMAGE_PIXELS = 89_478_485
"""Number of pixels from which Pillow takes a file for an attack."""
_LOCAL_SCHEMES = ("file", "local")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data setting."""

    path: str
    """Path or fsspec URL."""
    weight: float = 1.0
    """Average number of times that a prompt of the file occurs in an epoch."""

    @property
    def needs_copy(self) -> bool:
        """Whether the file is copied to the local cache before it is read."""
        return "://" in self.path

    @property
    def local_path(self) -> str | None:
        """Path on this machine; None for a remote file."""
        scheme, separator, path = self.path.partition("://")
        if not separator:
            return self.path
        return path if scheme in _LOCAL_SCHEMES else None


def parse_data_files(value: object, key: str) -> tuple[DataFile, ...]:
    """Return the files of a setting; none for an empty string.

    Raises:
        ConfigError: a value is not a string, a path in a list is empty, a weight is out of range or
            a file is listed twice.
    """
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, Sequence) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(
            key,
            value,
            "a path or a list of paths, each with an optional @weight",
            "a number or a mapping in its place",
        )
    if value == "":
        return ()
    files = tuple(_parse_data_file(entry, key) for entry in entries)
    paths = [file.local_path or file.path for file in files]
    counts = Counter(paths)
    for file, path in zip(files, paths, strict=True):
        if counts[path] > 1:
            raise ConfigError(
                key,
                value,
                f"each file once, but {file.path} occurs twice; give it a weight (@2) to draw its "
                "prompts more often",
            )
    return files


def _parse_data_file(entry: str, key: str) -> DataFile:
    match = _WEIGHT_RE.fullmatch(entry.strip())
    path, weight = (match[1], float(match[2])) if match else (entry.strip(), 1.0)
    if not path or not 0 < weight <= 1000:
        raise ConfigError(
            key,
            entry,
            "path or path@weight with a weight above 0, at most 1000",
            "an extra comma, or a file that should not be listed",
        )
    return DataFile(path, weight)


@dataclass
class DataConfig(Section, key="data"):
    """Sources of the prompts, their processing and their order."""

    train: Any = ""
    """Training files in the RL format, one or a list, optionally with weights:
    `data.train=[a.parquet,b.jsonl@0.5]`. Parquet, JSONL and JSONL.gz; local paths or fsspec URLs
    (`s3://`, `gs://`, `hf://`, `https://`, ...), which are downloaded to a local cache.
    Required."""
    validation: Any = ""
    """Validation files, like `data.train` but without weights; empty for no held-out evaluation."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, or a string that becomes one user message."""
    reward_fn_key: str = "data_source"
    """Column of the data source, which selects the prompt's reward."""
    prompt_template: str = ""
    """Jinja file that renders the last user message of each prompt; empty for none."""
    dataset_class: str = ""
    """User class that provides the rows instead of the files, `package.module:Class` or
    `/folder/file.py:Class`; empty for none."""
    prompts_per_step: Annotated[int, Range(at_least=1, at_most=1_000_000)] = 32
    """Prompts per RL step."""
    max_prompt_tokens: Annotated[int, Range(at_least=1, at_most=MAX_TOKENS, unit="tokens")] = 1024
    """Maximum length of a prompt."""
    truncation: Truncation = Truncation.error
    """Treatment of prompts over `data.max_prompt_tokens`."""
    order: PromptOrder = PromptOrder.shuffled
    """Order of the training prompts."""
    accept_changed_rows: bool = False
    """Continue a run although rows of `data.train` have changed since its last checkpoint: the
    epoch starts anew with them. Otherwise this is an error."""
    image_key: str = "images"
    """Column of a prompt's images, for a vision-language model: paths, URLs, base64 data URLs, or
    structs with `bytes` or `path`. They replace `<image>` in the messages, in order. Empty for
    none, so that `<image>` is text."""
    video_key: str = "videos"
    """Column of a prompt's videos, which replace `<video>`: animations (GIF, WebP, APNG), whose
    frames become images. Empty for none."""
    video_fps: Annotated[float, Range(above=0, at_most=1000, unit="1/s")] = 2.0
    """Frames per second that are taken from a video."""
    max_frames: Annotated[int, Range(at_least=1, at_most=10_000)] = 16
    """Maximum number of frames of a video; of a longer one they are spread evenly."""
    min_pixels: Annotated[int | None, Range(at_least=1, at_most=MAX_IMAGE_PIXELS)] = None
    """Smaller images are enlarged to about this many pixels; null is the model's own setting."""
    max_pixels: Annotated[int | None, Range(at_least=1, at_most=MAX_IMAGE_PIXELS)] = None
    """Larger images are reduced to at most this many pixels, and thus tokens: one for 784 pixels of
    Qwen2.5-VL, one for 1024 of Qwen3-VL. null is the model's own setting, often 16,384 tokens."""
    max_image_mib: Annotated[float, Range(above=0, at_most=1024, unit="MiB")] = 32.0
    """Maximum size of an image file."""
    max_image_pixels: Annotated[int, Range(at_least=1, at_most=MAX_IMAGE_PIXELS)] = 50_000_000
    """Maximum number of pixels of an image file, before it is resized."""
    verify_images: bool = True
    """Decode every image of the data before the run starts, so that a damaged one is an error then;
    otherwise its prompt fails when it is sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("prompt_key", "reward_fn_key"):
            column = getattr(self, key)
            check_range(bool(column.strip()), f"data.{key}", column, "the name of a column")
        check_range(
            not self.dataset_class or _CLASS_PATH_RE.fullmatch(self.dataset_class) is not None,
            "data.dataset_class",
            self.dataset_class,
            "package.module:Class, FILE.py:Class, or empty for the built-in dataset",
        )
        train = parse_data_files(self.train, "data.train")
        weighted = any(file.weight != 1 for file in train)
        check_range(
            not (weighted and self.dataset_class),
            "data.train",
            self.train,
            "no weights with data.dataset_class, whose rows do not say from which file they are",
        )
        if self.min_pixels is not None and self.max_pixels is not None:
            check_range(
                self.min_pixels <= self.max_pixels,
                "data.min_pixels",
                self.min_pixels,
                f"at most data.max_pixels={self.max_pixels}",
            )
        held_out = parse_data_files(self.validation, "data.validation")
        check_range(
            all(file.weight == 1 for file in held_out),
            "data.validation",
            self.validation,
            "no weights: every validation question is asked once",
        )
