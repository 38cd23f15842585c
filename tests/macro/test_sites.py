"""Where a call came from: found once a place, and right each time."""

import importlib
import linecache
from pathlib import Path

import m2flow
from m2flow import Dataset, flow, load_flow, steps
from m2flow.macro.graph import Site, forget_sites, owner, user_site
from m2flow.macro.tracing import trace

ROWS = [{"prompt": "a"}] * 4
HERE = Path(__file__).read_text().splitlines()


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(HERE, 1) if text in line)


def inner() -> Site:
    return user_site()


def test_one_line_that_is_reached_on_two_ways_is_two_places():
    first = inner()  # the first way
    second = inner()  # the second way
    assert (first.file, first.line, first.text) == (second.file, second.line, second.text)
    for site, text in ((first, "# the first way"), (second, "# the second way")):
        assert site.path[-1].endswith(f"test_sites.py:{line_of(text)} in test_one_line_that_is_reached_on_two_ways_is_two_places")


def test_two_calls_of_one_line_are_one_place_and_the_site_is_the_same_object():
    first, second = inner(), inner()
    assert first == second
    assert first is not second  # Two instructions.
    again = [inner() for _ in range(3)]
    assert again[0] is again[1] is again[2]


def test_places_of_code_that_is_gone_are_not_taken_for_those_of_new_code():
    """A new code object may have the number of one that was freed."""
    for text in ("x = 1; found.append(site())", "found.append(site())", "y = 2; z = 3; found.append(site())"):
        for line in range(20):
            found: list[Site] = []
            exec(compile("\n" * line + text, f"made_{line}.py", "exec"), {"found": found, "site": user_site})
            assert (found[0].file, found[0].line) == (f"made_{line}.py", line + 1)


@flow
def looping() -> None:
    prompts = Dataset(ROWS)
    for _ in steps(3):
        prompts.take(1)


def test_paths_are_relative_to_where_each_session_began(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    assert {call.site.file for call in trace(looping, {}, steps=3)[0].calls} == {"test_sites.py"}
    monkeypatch.chdir(Path(__file__).parents[2])
    assert {call.site.file for call in trace(looping, {}, steps=3)[0].calls} == {"tests/macro/test_sites.py"}


def test_a_recursion_has_a_place_for_each_depth_and_old_ones_are_forgotten(monkeypatch):
    monkeypatch.setattr("m2flow.macro.graph._MOST_KNOWN", 10)
    forget_sites()

    def deeper(left: int) -> list[Site]:
        return [user_site(), *(deeper(left - 1) if left else [])]

    for _ in range(2):
        sites = deeper(30)
        assert [len(site.path) - len(sites[0].path) for site in sites] == list(range(31))


def test_a_place_in_a_compiled_library_is_not_the_users_who_called_it(tmp_path, monkeypatch):
    """Its frames have the names that its sources had where it was built. A relative name alone says nothing: scripts change folders."""
    importlib.import_module("zmq")
    for built in ("zmq/backend/cython/_zmq.py", "pandas/_libs/hashtable.pyx", "/project/numpy/random/mtrand.pyx"):
        assert owner(built) == "library"
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    for mine in ("mine.py", "flow.py", "flows/of_another_folder.py", "<a cell>", "/tmp/ipykernel_7/8.py"):
        assert owner(mine) == "user"


def test_a_library_of_an_environment_that_this_one_stands_on_is_a_library(tmp_path):
    for folder in ("lib/python3.11/site-packages", "lib/python3/dist-packages"):
        assert owner(str(tmp_path / folder / "library.py")) == "library"
    assert owner(str(tmp_path / "mine.py")) == "user"


def test_a_flow_that_an_installed_m2flow_brings_along_is_a_program_of_the_user() -> None:
    package = Path(m2flow.__file__).parent
    assert owner(str(package / "flows" / "grpo.py")) == "user"
    assert owner(str(package / "macro" / "flow.py")) == "m2flow"


def test_the_line_of_a_call_is_that_of_the_file_that_was_loaded(monkeypatch, tmp_path):
    program = "from m2flow import Dataset, flow\n@flow\ndef tiny():\n    Dataset([{}])  # %s\n"
    for folder, said in [("a", "one"), ("b", "two"), ("b", "six")]:  # Another file of the relative name; an edit as long as it was before.
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        Path("tiny.py").write_text(program % said)
        code = load_flow("tiny.py").function.__code__
        assert linecache.getline(code.co_filename, 4).strip() == f"Dataset([{{}}])  # {said}"
