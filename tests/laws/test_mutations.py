"""The mutations of tests/mutations.py are of the code as it is; ``python -m tests.mutations`` applies them."""

from tests.mutations import MUTATIONS, ROOT


def test_the_text_of_every_mutation_is_in_the_code_once():
    found = {m.name: (ROOT / m.file).read_text().count(m.old) for m in MUTATIONS}
    assert found == dict.fromkeys(found, 1)
    assert len(found) == len(MUTATIONS) == 13
    assert [path for m in MUTATIONS for path in m.tests if not (ROOT / path).exists()] == []
