"""The result as text and as JSON."""

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.doctor.diagnosis import Diagnosis, Subject


def a_diagnosis():
    found = Diagnosis()
    found.note("the clock is slow", "buy another one")
    found.refusal(UnsupportedConfiguration("cluster.interface (eth9) must be an interface (lo; eth0); choose one"))
    subject = Subject("machine")
    subject.add("cores", "2 of 2", {"usable": 2})
    subject.add("a name that needs a line of its own", "word " * 40, why="it is long")
    found.subjects.append(subject)
    return found


def test_problems_come_first_each_with_its_cure_in_80_columns():
    lines = a_diagnosis().to_text().splitlines()
    assert lines[0] == "paramserver doctor: 1 problem, 1 note"
    assert lines[2:4] == [
        "  problem: cluster.interface (eth9) must be an interface (lo; eth0)",
        "     cure: choose one",
    ]
    assert lines[5:7] == ["     note: the clock is slow", "     cure: buy another one"]
    assert lines[8:10] == ["machine", "  cores             2 of 2"]
    assert max(map(len, lines)) <= 80


def test_a_long_path_stays_in_one_piece():
    path = "/" + "x" * 100
    found = Diagnosis()
    found.problem(f"{path} cannot be written to", "choose another")
    assert path in found.to_text()


def test_json_has_the_same_and_values_for_programs():
    found = a_diagnosis()
    content = found.to_json()
    assert content["exit_code"] == found.exit_code == 1
    assert [one["cure"] for one in content["problems"]] == ["choose one"]
    assert [one["text"] for one in content["notes"]] == ["the clock is slow"]
    assert content["machine"]["cores"] == {"usable": 2}


def test_a_note_alone_is_no_problem():
    found = Diagnosis()
    assert found.to_text() == "paramserver doctor: no problems"
    found.note("the clock is slow", "buy another one")
    assert found.exit_code == 0
