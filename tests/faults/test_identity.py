"""Catalogs and blocks of another time, another model, other weights or another version on one directory."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.faults import tiny
from tests.faults.server import MIB, Talk, serving, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.faults.conftest import Control


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Path]:
    """A directory for more than one model: a file of slots takes 256 MiB of the quota, if there is that much."""
    yield tmp_path / "nvme"
    shutil.rmtree(tmp_path / "nvme")


def slab_bytes(root: Path) -> int:
    """Of all models."""
    return sum(path.stat().st_size for path in root.rglob("*.kv"))


def copy_catalog(source: Path, target: Path) -> None:
    for path in source.glob("catalog.sqlite*"):
        shutil.copy(path, target / path.name)


ROOMY = {"nvme_bytes": 600 * MIB}

# --- the catalog --------------------------------------------------------------------------


def test_a_stale_catalog_names_slots_that_hold_other_blocks_by_now_and_none_is_taken_for_another(
    model: Path, tmp_path: Path, control: Control, retold: Callable[[Talk], str]
) -> None:
    root, before = tmp_path / "nvme", tmp_path / "before"
    configured = settings(model, root, nvme_bytes=256 * 1024)  # 21 slots, so that the next session takes the first's
    before.mkdir()
    first, second = Talk("the first mouse"), Talk("a second one")
    with serving(configured) as server:
        server.say(first)
    copy_catalog(root, before)
    with serving(configured) as server:
        server.http.delete(f"/v1/sessions/{first.id}")
        server.say(second)
        server.settle()
    for path in root.glob("catalog.sqlite*"):
        path.unlink()
    copy_catalog(before, root)
    with serving(configured) as server:
        told = server.say(first)
        server.check_missed(told, "evicted")
        assert first.texts == control(first.name)[:2]
        assert server.say(second)["miss_reason"] == "new_session", "which the catalog does not know"
        assert second.texts[-1] == retold(second)
        server.check_sound()


def test_after_the_catalog_was_deleted_blocks_are_found_again_and_what_was_deleted_before_is_not(
    model: Path, tmp_path: Path, control: Control, retold: Callable[[Talk], str]
) -> None:
    root = tmp_path / "nvme"
    kept, deleted = Talk("a mouse that stays"), Talk("another that was deleted")
    with serving(settings(model, root)) as server:
        server.say(kept)
        server.say(deleted)
        server.settle()
        assert server.http.delete(f"/v1/sessions/{deleted.id}").status_code == 200
    for path in root.glob("catalog.sqlite*"):
        path.unlink()
    with serving(settings(model, root)) as server:
        assert server.http.get("/v1/sessions").json()["data"] == []
        assert server.state()["totals"]["found"] > 0
        told = server.say(kept)
        server.check_missed(told, "catalog_lost")
        assert told["reused_tokens"]["nvme"] > 100, "the blocks were found by what they say of themselves"
        deleted.texts.clear()
        again = server.say(deleted, session_id="begun-anew")
        assert again["miss_reason"] == "new_session"
        assert sum(again["reused_tokens"].values()) == 0, "its blocks are not there any more"
        assert kept.texts[-1] == retold(kept)
        assert deleted.texts == control(deleted.name)[:1]


def test_what_another_version_wrote_is_set_aside_and_said(
    model: Path, roomy: Path, retold: Callable[[Talk], str]
) -> None:
    root, talk = roomy, Talk("a mouse of old")
    with serving(settings(model, root, **ROOMY)) as server:
        server.say(talk)
    (root / "dormouse-format").write_text("0\n")
    with serving(settings(model, root, **ROOMY)) as server:
        told = server.say(talk)
        server.check_missed(told, "store_format")
        assert sum(told["reused_tokens"].values()) == 0
        assert list(root.glob("set-aside-format-0/*/slabs/*.kv"))
        assert talk.texts[-1] == retold(talk)
        server.asleep(talk)
        assert server.say(talk)["woke_from"] == "nvme"
        assert slab_bytes(root) <= server.state()["nvme"]["quota_bytes"]


# --- the model ----------------------------------------------------------------------------


def test_other_weights_under_the_same_name_meet_none_of_the_blocks_and_the_first_ones_do_again(
    model: Path, tmp_path: Path, roomy: Path, control: Control
) -> None:
    folder, root, talk = tmp_path / "models" / "tiny", roomy, Talk("a mouse of one mind")
    shutil.copytree(model, folder)
    with serving(settings(folder, root, **ROOMY)) as server:
        server.say(talk)
    tiny.perturb(folder)
    other = Talk(talk.name, list(talk.texts))
    with serving(settings(folder, None)) as server:
        alone = Talk(talk.name, list(talk.texts))
        server.say(alone)
    with serving(settings(folder, root, **ROOMY)) as server:
        told = server.say(other)
        server.check_missed(told, "model_changed")
        assert sum(told["reused_tokens"].values()) == 0
    assert other.texts == alone.texts
    assert other.texts != control(talk.name)[:2], "so a block that was taken over would show"
    shutil.rmtree(folder)
    shutil.copytree(model, folder)
    with serving(settings(folder, root, **ROOMY)) as server:
        told = server.say(talk)
        assert (told["miss_reason"], told["woke_from"], told["turn"]) == (None, "nvme", 2)
        assert talk.texts == control(talk.name)[:2]


def test_another_dtype_meets_none_of_the_blocks(model: Path, roomy: Path, control: Control) -> None:
    root, talk = roomy, Talk("a mouse of few digits")
    with serving(settings(model, root, **ROOMY)) as server:
        server.say(talk)
    with serving(settings(model, root, dtype="bf16", **ROOMY)) as server:
        told = server.say(Talk(talk.name, list(talk.texts)))
        server.check_missed(told, "model_changed")
        assert sum(told["reused_tokens"].values()) == 0
    with serving(settings(model, root, **ROOMY)) as server:
        assert server.say(talk)["woke_from"] == "nvme"
        assert talk.texts == control(talk.name)[:2]


def test_a_model_whose_blocks_gave_way_to_anothers_has_its_sessions_still_and_the_store_is_sound(
    model: Path, tmp_path: Path, embedded_folder: Path, control: Control
) -> None:
    root, quota = tmp_path / "nvme", 512 * 1024
    larger = tiny.save(tmp_path / "larger", embedded_folder, num_hidden_layers=3, num_key_value_heads=4)
    talk, others = Talk("a mouse that gave way"), Talk("a mouse of the second")
    with serving(settings(model, root, nvme_bytes=quota)) as server:
        server.say(talk)
        server.settle()
    with serving(settings(larger, root, nvme_bytes=quota)) as server:
        server.say(others)
        server.settle()
        assert len(list(root.glob("*/slabs/*.kv"))) == 1
        assert server.http.post("/admin/api/store/verify", json={}).json()["sound"]
    with serving(settings(model, root, nvme_bytes=quota)) as server:
        told = server.say(talk)
        assert told["miss_reason"] in ("evicted", "not_written"), "its catalog has no word of them"
        assert talk.texts == control(talk.name)[:2]


def test_a_model_of_another_shape_on_the_same_directory_leaves_the_firsts_sessions_asleep_within_one_quota(
    model: Path, tmp_path: Path, roomy: Path, embedded_folder: Path, control: Control
) -> None:
    root, quota = roomy, 600 * MIB
    larger = tiny.save(tmp_path / "larger", embedded_folder, num_hidden_layers=3, num_key_value_heads=4)
    talks = [Talk(f"mouse {number} of the first") for number in range(2)]
    with serving(settings(model, root, nvme_bytes=quota)) as server:
        for talk in talks:
            server.say(talk)
        server.settle()
        assert slab_bytes(root) <= server.state()["nvme"]["quota_bytes"] <= quota
    with serving(settings(larger, root, nvme_bytes=quota)) as server:
        assert server.http.get("/v1/sessions").json()["data"] == []
        for number in range(6):
            server.say(Talk(f"mouse {number} of the second"))
            server.wait_for(lambda: server.live.gateway.manager.snapshot().transfers == 0)
            assert slab_bytes(root) <= quota
    with serving(settings(model, root, nvme_bytes=quota)) as server:
        for talk in talks:
            told = server.say(talk)
            assert (told["miss_reason"], told["woke_from"]) == (None, "nvme")
            assert talk.texts == control(talk.name)[:2]
        assert slab_bytes(root) <= quota
