"""A small transformer that predicts the next character of a text whose entropy is known.

A probabilistic grammar writes the text::

    two cats [a hen sees it] that help a dog meet two frogs.
    "a goat {two lions follow a goat} greets it" says eve.
    7+8=15

What is learned: the words; that a verb agrees with its subject (``a cat sees``, ``two cats see``) across other nouns;
that nested brackets of three kinds, and quotes, are closed, and by which character; the sums of two digits.

What can be reached: the first character of an alternative of a rule determines the alternative (the grammar is LL(1)).
So the generator knows the probability of each character given all before it. The mean of their negative logarithms is
the lowest loss that a model can be expected to reach. Validation returns it for its own characters as ``entropy``, and
the distance of the loss to it as ``excess``. ``entropy_rate`` computes it from the grammar, for a text without end: it
is lower there, as every sample begins with a line, where a text is less certain than later.

``python examples/characters/task.py`` prints both, and the loss of a table of pairs. The task runs in all modes.
"""

import math
import random
import re

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paramserver import Task

# The probability of an alternative is proportional to its number; <name> stands for an alternative of that rule.
RULES: dict[str, dict[str, float]] = {
    "line": {"<claim>.\n": 5, '"<claim>" says <name>.\n': 2, "<sum>\n": 2},
    "claim": {"a <noun> <sees>": 1, "two <noun>s <see>": 1},
    "sees": {"<verb>s <object>": 6, "that <verb>s <object> <sees>": 2, "<aside> <sees>": 2},
    "see": {"<verb> <object>": 6, "that <verb> <object> <see>": 2, "<aside> <see>": 2},
    "aside": {"(<claim>)": 1, "[<claim>]": 1, "{<claim>}": 1},
    "object": {"a <noun>": 2, "two <noun>s": 2, "it": 1},
    "noun": dict.fromkeys(["bear", "cat", "dog", "frog", "goat", "hen", "lion", "mule", "pig", "seal", "worm"], 1),
    "verb": dict.fromkeys(["chase", "follow", "greet", "help", "invite", "like", "meet", "praise", "see", "visit"], 1),
    "name": dict.fromkeys(["ann", "bob", "cid", "dan", "eve", "fay", "gus", "hal"], 1),
    "sum": {f"{a}+<plus{a}>": 1 for a in range(10)},
    **{f"plus{a}": {f"{b}={a + b}": 1 for b in range(10)} for a in range(10)},
}
# Of each rule the alternatives: the probability, and a list of texts and names of rules.
GRAMMAR = {
    f"<{name}>": [
        (weight / sum(rule.values()), list(filter(None, re.split(r"(<\w+>)", text)))) for text, weight in rule.items()
    ]
    for name, rule in RULES.items()
}
CHARACTERS = "".join(sorted(set(re.sub(r"<\w+>", "", "".join(text for rule in RULES.values() for text in rule)))))


def entropy_rate():
    """Return the entropy of a line divided by its expected length, in nats per character."""
    entropy, length = dict.fromkeys(GRAMMAR, 0.0), dict.fromkeys(GRAMMAR, 0.0)
    for _ in range(100):  # after k rounds, with all that is nested less than k deep
        for name, rule in GRAMMAR.items():
            entropy[name] = sum(
                p * (sum(entropy.get(piece, 0) for piece in pieces) - math.log(p)) for p, pieces in rule
            )
            length[name] = sum(p * sum(length.get(piece, len(piece)) for piece in pieces) for p, pieces in rule)
    return entropy["<line>"] / length["<line>"]


def write(length, generator):
    """Return the first characters of a text, and the negative logarithm of the probability of each, in nats."""
    text, nats, stack, choices = "", [], [], 0.0
    while len(text) < length:
        piece = stack.pop() if stack else "<line>"
        if piece in GRAMMAR:
            ((p, pieces),) = generator.choices(GRAMMAR[piece], [p for p, _ in GRAMMAR[piece]])
            choices -= math.log(p)
            stack += reversed(pieces)
        else:  # its first character determines all choices since the last text
            text += piece
            nats += [choices] + [0.0] * (len(piece) - 1)
            choices = 0.0
    return text[:length], nats[:length]


def table_loss(trained, validated):
    """Return the loss per character of a table of pairs: how often a character follows another one in ``trained``."""
    size = len(CHARACTERS)
    pairs = trained[:, :-1] * size + trained[:, 1:]
    counts = 1 + torch.bincount(pairs.flatten(), minlength=size**2).view(size, size)
    scores = counts.log()[validated[:, :-1]]  # softmax makes shares of the logarithms of counts
    return F.cross_entropy(scores.flatten(0, 1), validated[:, 1:].flatten())


class Transformer(nn.Module):
    """Logits of the next character after each of up to ``length`` characters."""

    def __init__(self, length, width, heads=4, layers=2):
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Parameter(torch.empty(length, width))
        for parameter in (self.characters.weight, self.positions):  # of one size, or positions are learned late
            nn.init.normal_(parameter, std=0.1)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, characters):
        length = characters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=characters.device)
        return self.head(self.layers(self.characters(characters) + self.positions[:length], mask, is_causal=True))


class Characters(Task):
    """Predicts each character of a text from all before it.

    Args:
        samples: texts of the training data.
        length: characters of a text.
        width: of the transformer.
        lr: the highest learning rate of AdamW.
        steps: of the schedule, which is a warmup in the first tenth, and a cosine to zero.
    """

    def __init__(
        self, samples: int = 20_000, length: int = 64, width: int = 64, lr: float = 6e-3, steps: int = 600
    ) -> None:
        self.samples, self.length, self.width, self.lr, self.steps = samples, length, width, lr, steps

    def build_model(self):
        return Transformer(self.length, self.width)

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), self.lr)

    def build_scheduler(self, optimizer):
        def factor(step):
            progress = min((step + 1) / self.steps, 1.0)
            return min(10 * progress, 0.5 + 0.5 * math.cos(math.pi * progress))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def _texts(self, count, seed):
        """An end of line and the characters of each text, as numbers, and the mean of the text's nats."""
        generator = random.Random(seed)
        texts, nats = zip(*(write(self.length, generator) for _ in range(count)), strict=True)
        numbers = [[CHARACTERS.index(character) for character in "\n" + text] for text in texts]
        return TensorDataset(torch.tensor(numbers), torch.tensor(nats).mean(1))

    def train_source(self, partition):
        return self._texts(self.samples, 1)

    def validation_source(self, partition):
        return self._texts(1000, 2)

    def training_step(self, model, batch, batch_idx):
        texts, _ = batch
        return F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())

    def validation_step(self, model, batch, valid_batch_idx, batch_idx):
        loss, entropy = self.training_step(model, batch, batch_idx), batch[1].mean()
        return {"loss": loss, "bits_per_character": loss / math.log(2), "entropy": entropy, "excess": loss - entropy}


if __name__ == "__main__":
    trained, validated = Characters().train_source(None).tensors, Characters().validation_source(None).tensors
    print(f"table of pairs  {table_loss(trained[0], validated[0]):.4f} nats per character")
    print(f"entropy         {validated[1].mean():.4f}, of a text without end {entropy_rate():.4f}")
