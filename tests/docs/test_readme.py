"""What `make readme` takes for a block, and that the pages have what it is to run."""

from __future__ import annotations

from pathlib import Path

from tests.docs.readme import PAGES, Block, Took, blocks, tell

ROOT = Path(__file__).parents[2]


def test_blocks_are_taken_whole_and_in_order_and_others_are_left() -> None:
    text = "# A\n\n```bash\nmake serve\n```\n\n```toml\nx = 1\n```\n\n    indented\n\n```python\nprint(1)\n```\n"
    found = blocks("A.md", text)
    assert found == [Block("A.md", 3, "bash", "make serve\n"), Block("A.md", 13, "python", "print(1)\n")]
    assert [block.serves for block in found] == [True, False]


def test_every_page_serves_before_it_talks() -> None:
    for page in PAGES:
        first, *others = blocks(page, (ROOT / page).read_text())
        assert first.serves
        assert any("sleep" in block.text for block in others)
        assert any("wake" in block.text for block in others)


def test_no_block_ends_other_peoples_processes() -> None:
    text = "".join(block.text for page in PAGES for block in blocks(page, (ROOT / page).read_text()))
    assert "pkill" not in text
    assert "killall" not in text


def test_the_time_to_install_is_told_apart_and_the_rest_is_held_against_the_limit() -> None:
    serve, chat = Block("README.md", 1, "bash", "make serve\n"), Block("README.md", 5, "bash", "make chat\n")
    assert tell(Took([(serve, 900.0), (chat, 299.0)]), 5.0) == 0
    assert tell(Took([(serve, 900.0), (chat, 301.0)]), 5.0) == 1
