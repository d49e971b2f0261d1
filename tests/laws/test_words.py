"""The language of the source: docstrings, comments and messages use the terms of the field."""

import re
import tokenize

from source_tree import modules

# Figures of speech that hide who does what: write "reports", "receives", "continues", "in addition to", "no process".
SYMPTOMS = re.compile(
    r"\b(?:told|tells|somebody|nobody|whoever|everybody|goodbye|goes on|go on|lets go|beside)\b", re.IGNORECASE
)


def text_of(path) -> list[tuple[int, str]]:
    """Line and text of each comment, docstring and string; f-strings are strings too."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    with tokenize.open(path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


def symptoms(path) -> list[str]:
    """ "line: words" for each piece of text with a figure of speech; a phrase may continue on the next line."""
    return [
        f"{line}: {', '.join(found)}"
        for line, text in text_of(path)
        if (found := SYMPTOMS.findall(re.sub(r"\s+(?:#\s*)?", " ", text)))
    ]


def test_text_uses_the_words_of_the_field():
    assert {module.name: found for module in modules() if (found := symptoms(module.path))} == {}


def test_the_search_finds_docstrings_comments_and_messages(tmp_path):
    file = tmp_path / "example.py"
    file.write_text('"""Tells."""\nx = f"{1} was told"  # nobody\ny = "go\\n"\ntold = 1\n')
    assert [line.partition(":")[0] for line in symptoms(file)] == ["1", "2", "2"]
