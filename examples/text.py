"""Text as characters: the standard library's documentation, or any file of yours.

The last tenth is for validation. The vocabulary consists of the characters in the other
nine tenths; token 0 means any other character. A batch depends on (seed, step) alone,
so resumed runs and compared optimizers read the same batches.
"""

import dataclasses
import hashlib
import pathlib

import numpy as np
from jaxtyping import Int
from minimal import documentation, random_windows, windows_at

VALIDATION_BATCHES = 8
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class Text:
    """Training and validation text as tokens, with the vocabulary to decode them."""

    name: str
    sha256: str  # of the whole text in UTF-8
    vocabulary: str  # token i is the character vocabulary[i]
    train: Int[np.ndarray, " characters"]
    validation: Int[np.ndarray, " characters"]

    def __str__(self) -> str:
        total = self.train.size + self.validation.size
        unknown = np.count_nonzero(self.validation == 0)
        strange = f", {unknown} of them unknown and read as {UNKNOWN}"
        return (
            f"{self.name}: {total:,} characters, sha256 {self.sha256}\n"
            f"{self.train.size:,} to train on, {len(self.vocabulary) - 1} distinct; "
            f"{self.validation.size:,} to validate{strange if unknown else ''}"
        )

    def decode(self, tokens: Int[np.ndarray, " characters"]) -> str:
        return "".join(self.vocabulary[token] for token in tokens)

    def batch(
        self, seed: int, step: int, size: int, context: int
    ) -> Int[np.ndarray, "size context_plus_one"]:
        """The windows of one step, such as (16, 129), at random places."""
        return random_windows(self.train, [seed, step], size, context)

    def validation_batches(
        self, size: int, context: int
    ) -> Int[np.ndarray, "batches size context_plus_one"]:
        """Up to 8 batches of windows, evenly spread and always the same."""
        tokens = self.validation
        batches = np.clip(tokens.size // (size * context), 1, VALIDATION_BATCHES)
        last = tokens.size - context - 1  # where the last window starts
        starts = np.linspace(0, last, batches * size).astype(int)
        return windows_at(starts, tokens, context).reshape(batches, size, -1)


def read_text(path: str | None, context: int) -> Text:
    """Reads a UTF-8 file, or the documentation that comes with Python.

    Raises:
        ValueError: the file cannot be read as text, or its last tenth does not hold one
            window of context + 1 characters.
    """
    name = path or "pydoc_data.topics"
    text = read_file(path) if path else documentation()
    needed = 10 * (context + 1)
    if len(text) < needed:
        raise ValueError(
            f"{name} is too short: {len(text):,} characters. A context of {context} "
            f"needs {needed:,}: the last tenth is for validation and must hold "
            f"{context + 1}"
        )
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    cut = points.size - points.size // 10
    known = np.unique(points[:cut])  # sorted
    place = np.searchsorted(known, points).clip(max=known.size - 1)
    tokens = np.where(known[place] == points, place + 1, 0).astype(np.int32)
    return Text(
        name=name,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        vocabulary=UNKNOWN + "".join(map(chr, known)),
        train=tokens[:cut],
        validation=tokens[cut:],
    )


def read_file(path: str) -> str:
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; expected a text file in UTF-8"
        ) from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} ({len(content):,} bytes) is not text in UTF-8: byte "
            f"{error.start:,} is {content[error.start]:#04x}; expected a text "
            f"file in UTF-8"
        ) from error
