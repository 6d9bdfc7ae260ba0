"""Text for a language model: its characters as integers, batches of it, and a baseline.

>>> text = load_text()
>>> text.characters[:5], len(text.training), len(text.held_out), text.decode(text.training[8:35])
('\\n !"\\'', 411066, 45674, "Of Man's first disobedience")
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from importlib import resources

import numpy as np

TRAINING = 0.9  # the fraction of the text to train with; the rest is held out


@dataclass(frozen=True)
class Text:
    """A text split in two: characters as their places [n] in the string of all characters that occur."""

    characters: str
    training: np.ndarray
    held_out: np.ndarray

    def encode(self, text: str) -> np.ndarray:
        """The places of characters, [n]. Raises ValueError for one that does not occur in the text."""
        if unknown := set(text) - set(self.characters):
            raise ValueError(f"{sorted(unknown)} do not occur in the text; its characters are {self.characters!r}")
        return np.array([self.characters.index(c) for c in text], int)

    def decode(self, places: np.ndarray) -> str:
        """The characters at the places, as a string."""
        return "".join(self.characters[place] for place in places)

    def batch(self, seed: int, step: int, examples: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Random parts of the training text and the next characters, both [examples, length].

        They follow from the seed and the step: so ranks agree, and a resumed run gets what it would have got.
        """
        starts = np.random.default_rng([seed, step]).integers(len(self.training) - length, size=examples)
        windows = self.training[starts[:, None] + np.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def held_out_batches(self, examples: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The held-out text in parts, without the last that do not make a batch."""
        count = (len(self.held_out) - 1) // (examples * length)
        inputs, labels = (
            part[: count * examples * length].reshape(count, examples, length)
            for part in (self.held_out[:-1], self.held_out[1:])
        )
        return list(zip(inputs, labels))


def load_text() -> Text:
    """John Milton's Paradise Lost; see the note in the folder `data`."""
    packed = resources.files("spmd.examples").joinpath("data/paradise_lost.txt.xz").read_bytes()
    text = lzma.decompress(packed).decode("ascii")
    characters = "".join(sorted(set(text)))
    places = np.searchsorted(np.frombuffer(characters.encode(), np.uint8), np.frombuffer(text.encode(), np.uint8))
    split = int(TRAINING * len(text))
    return Text(characters, places[:split], places[split:])


def ngram_loss(text: Text, n: int = 3) -> float:
    """The mean of -log of the probability, in nats, that an n-gram model gives to held-out characters.

    The probability of a character after the n - 1 before it is its frequency in the training text there, mixed with
    what the (n-1)-gram model says, which weighs as much as there are different characters after these (Witten and
    Bell, "The zero-frequency problem", 1991).

    >>> text = load_text()
    >>> [round(ngram_loss(text, n), 3) for n in (1, 2, 3)]
    [3.126, 2.422, 1.981]
    """
    size = len(text.characters)
    probability = np.full(size, 1 / size)
    for k in range(1, n + 1):
        counts = np.zeros((size,) * k)
        np.add.at(counts, _windows(text.training, k), 1)
        total, different = (x.sum(axis=-1, keepdims=True) for x in (counts, counts > 0))
        probability = (counts + different * probability) / np.maximum(total + different, 1) + (total == 0) * probability
    return float(-np.mean(np.log(probability[_windows(text.held_out, n)])))


def _windows(places: np.ndarray, k: int) -> tuple[np.ndarray, ...]:
    """All k consecutive places, as k arrays."""
    return tuple(places[i : len(places) - k + 1 + i] for i in range(k))
