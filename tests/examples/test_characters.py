"""examples/characters: a transformer on a text whose entropy is known, in its smallest form."""

import math
import random
import re

import pytest
import torch
from example_modules import EXAMPLES, load_example
from launching import run_in_process


@pytest.fixture(scope="module")
def example():
    return load_example("characters", "Characters").task


@pytest.mark.nightly
def test_the_model_is_better_than_a_table_of_pairs_after_few_steps(tmp_path, example):
    arguments = {"samples": 3000, "lr": 0.01, "steps": 150}
    training = {"max_steps": 150, "batch_size": 32, "validation_batch_size": 250}
    task = f"{EXAMPLES / 'characters' / 'task.py'}:Characters"
    run = run_in_process(tmp_path, task=task, task_args=arguments, training=training)
    assert run.code == 0, run.output
    values = run.of_kind("validation")[-1]["values"]
    task = example.Characters(**arguments)
    trained, validated = task.train_source(None).tensors, task.validation_source(None).tensors
    assert values["entropy"] == pytest.approx(float(validated[1].mean()))
    assert values["entropy"] < values["loss"] < 0.6 * float(example.table_loss(trained[0], validated[0]))
    assert values["excess"] == pytest.approx(values["loss"] - values["entropy"])
    assert values["bits_per_character"] == pytest.approx(values["loss"] / math.log(2))


def test_the_entropy_rate_is_that_of_a_long_text(example):
    text, nats = example.write(200_000, random.Random(3))
    assert len(text) == len(nats) == 200_000
    assert sum(nats) / len(nats) == pytest.approx(example.entropy_rate(), rel=0.01)


def test_the_first_character_of_an_alternative_determines_it(example):
    def first(piece):
        alternatives = example.GRAMMAR.get(piece)
        return set().union(*(first(pieces[0]) for _, pieces in alternatives)) if alternatives else {piece[0]}

    for name, rule in example.GRAMMAR.items():
        firsts = [first(pieces[0]) for _, pieces in rule]
        assert sum(map(len, firsts)) == len(set().union(*firsts)), name


def test_verbs_agree_brackets_close_and_sums_are_right(example):
    lines = example.write(200_000, random.Random(4))[0].splitlines()[:-1]
    assert any(re.search(r"\([^)]*\[[^]]*\{", line) for line in lines)
    verbs = example.RULES["verb"]
    for line in lines:
        if "=" in line:
            terms, _, total = line.partition("=")
            assert sum(map(int, terms.split("+"))) == int(total)
            continue
        claim, asides = line.partition('" says')[0].strip('".'), 1
        while asides:  # the innermost are removed first
            claim, asides = re.subn(r"(\([a-z ]*\)|\[[a-z ]*\]|\{[a-z ]*\}) ", "", claim)
        assert re.fullmatch("[a-z ]+", claim), line
        first, *words = claim.split()
        found = [word for word in words if word in verbs or word.removesuffix("s") in verbs]
        assert found
        assert {word in verbs for word in found} == {first == "two"}, line


def test_texts_are_those_of_their_seed(example):
    task = example.Characters(samples=1000)
    texts, again = task.train_source(None).tensors[0], task.train_source(None).tensors[0]
    assert torch.equal(texts, again)
    assert texts.shape == (1000, 65)
    validated = task.validation_source(None).tensors[0]
    trained = set(map(tuple, texts.tolist()))
    assert sum(tuple(text) in trained for text in validated.tolist()) < 10
