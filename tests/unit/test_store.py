import multiprocessing

import pytest

from speedproof.core import files
from speedproof.core import store as store_module
from speedproof.core.store import Store

IDENTITY = {"kind": "run", "seed": 1}


def test_an_entry_appears_whole_or_not_at_all(tmp_path):
    store = Store(tmp_path)

    def fail_halfway():
        with store.publish("runs", IDENTITY) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert store.find("runs", IDENTITY) is None
    assert not list((tmp_path / "runs").rglob("half"))
    with store.publish("runs", IDENTITY) as folder:
        (folder / "whole").write_text("x")
        assert store.find("runs", IDENTITY) is None
    assert (store.find("runs", IDENTITY) / "whole").read_text() == "x"


def test_the_first_of_two_equal_entries_stays(tmp_path):
    store = Store(tmp_path)
    with store.publish("runs", IDENTITY) as first:
        (first / "by").write_text("first")
        with store.publish("runs", IDENTITY) as second:
            (second / "by").write_text("second")
    assert (store.find("runs", IDENTITY) / "by").read_text() == "second"
    assert not list(tmp_path.rglob("*.partial"))


def test_a_folder_without_identity_is_no_entry(tmp_path):
    store = Store(tmp_path)
    store.path("runs", IDENTITY).mkdir(parents=True)
    assert store.find("runs", IDENTITY) is None
    with store.publish("runs", IDENTITY) as folder:
        (folder / "whole").write_text("x")
    assert store.find("runs", IDENTITY)


def test_an_entry_that_is_dropped_is_gone_at_once(tmp_path, monkeypatch):
    # A kill in the middle of the clearing up would leave an identity without what belongs to it.
    store = Store(tmp_path)
    with store.publish("runs", IDENTITY) as folder:
        (folder / "x").write_text("old")
    monkeypatch.setattr(store_module.shutil, "rmtree", lambda *args, **kwargs: None)
    store.replace("runs", IDENTITY)
    assert store.find("runs", IDENTITY) is None
    monkeypatch.undo()
    store.replace("runs", IDENTITY)
    with store.publish("runs", IDENTITY) as folder:
        (folder / "x").write_text("new")
    assert (store.find("runs", IDENTITY) / "x").read_text() == "new"


def _make(root, made):
    store = Store(root)
    with store.lock("runs", IDENTITY):
        if store.find("runs", IDENTITY) is None:
            with store.publish("runs", IDENTITY) as folder:
                (folder / "x").write_text("x")
                with made.get_lock():
                    made.value += 1


def test_processes_that_want_the_same_entry_make_it_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    made = context.Value("i", 0)
    processes = [context.Process(target=_make, args=(tmp_path, made)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert made.value == 1


def test_nearest_names_the_differing_fields(tmp_path):
    store = Store(tmp_path)
    for seed, lr in ((1, 0.1), (2, 0.2)):
        with store.publish("runs", {"seed": seed, "lr": lr}):
            pass
    path, found = store.nearest("runs", {"seed": 3, "lr": 0.2})
    assert found == {"seed": (2, 3)}
    assert files.read_json(path / "identity.json") == {"seed": 2, "lr": 0.2}
    assert store.nearest("records", IDENTITY) is None
