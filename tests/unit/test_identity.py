import pytest

from speedproof.core import identity


def test_canonical_ignores_order_and_refuses_nan():
    assert identity.canonical({"b": 1, "a": 2.5}) == '{"a":2.5,"b":1}'
    assert identity.digest({"a": 1, "b": 2}) == identity.digest({"b": 2, "a": 1})
    assert identity.digest({"a": 1}) != identity.digest({"a": 2})
    with pytest.raises(ValueError, match="JSON"):
        identity.canonical({"a": float("inf")})


CODE = '''
"""A module."""

def add(a, b):
    """Add."""
    # plainly
    return a + b
'''


def test_comments_docstrings_and_layout_do_not_count_but_an_operator_does():
    plain = "def add(a,b):\n  return (a+b)\n"
    assert identity.parsed(CODE) == identity.parsed(plain)
    assert identity.parsed(CODE) != identity.parsed(CODE.replace("a + b", "a - b"))
    assert identity.parsed(CODE) != identity.parsed(CODE.replace("def add(a", "def add(c"))


def test_a_function_of_a_docstring_alone_is_still_read():
    assert identity.parsed('def f():\n    """Only words."""\n')


@pytest.mark.parametrize("kind", sorted(identity.SOURCES))
def test_every_kind_names_files_that_exist(kind):
    paths = identity.source_files(kind)
    assert paths
    assert [str(p) for p in paths if not p.is_file()] == []
    assert len(identity.source_digest(kind)) == 64


def test_differences_name_the_dotted_keys():
    a = {"recipe": {"lr": 1, "seed": 2}, "torch": "2.13"}
    b = {"recipe": {"lr": 1, "seed": 3}, "gpu": "H200", "torch": "2.13"}
    assert identity.differences(a, b) == {"recipe.seed": (2, 3), "gpu": (None, "H200")}
