"""Prompts of a wanted length that share nothing with each other.

Every word below is one token of the embedded model after a space (and of most byte-pair vocabularies), so a prompt's
length is a count of words plus what the server's template adds. How much that is, two probes of the server tell
(lengths.py), whatever its tokenizer.
"""

from __future__ import annotations

import random

Messages = list[dict[str, str]]

OPENING = "Words:"
"""Before the first word, so that every word has its space."""

QUESTION = "Tell me a long story with as many of these words as you can."
"""Last, so that the model goes on for as many tokens as are asked for instead of ending at once."""

FOLLOW_UP = "Go on: what happens next, and why?"

_LIST = """
able acid actor age air animal answer apple area arm army art autumn baby back bag ball band bank bar base basket bath
beach bear bed bell bird birth blood blue board boat body bone book border bottle bottom box boy branch bread bridge
brother brown building business cake camp capital car card care case castle cat cause center chain chair chance child
church circle city class clock cloud coast coat coffee cold color corn corner cotton country course cover cow cross
cup dance day deal death desert design desk dinner direction doctor dog door dream dress dust ear earth east edge egg
engine evening event eye face fact family farm father field fire fish floor flower food foot forest fork friend frog
front fruit game garden gas gate gift girl glass goat gold grain grass green ground group guard guide hair hall hand
hat head health heart heat hill history hole home honey horse hospital hotel hour house ice idea ink iron island job
journey key king kitchen knife lake lamp land language law leaf leg lesson letter library life light line lion list
lock machine man map market master meal meat metal middle milk mind mine minute mirror moment money month moon morning
mother mountain mouse mouth movie music name nature neck nest news night noise north nose note number nut ocean oil
orange order owner page paint pair palace paper park part party path peace pen pencil person phone picture piece pig
place plane plant plate play pocket poem point pool post pot power prince prison queen question rabbit rain reason
record red rice ring river road rock roof room root rope rose salt sand school sea season seat seed shade shadow ship
shoe shop shore silver sister skin sky sleep smoke snow soil son song sound south space spoon spring square stage star
station stick stone storm story street student summer sun sword table tail tea teacher tent test thread tiger time
tool tooth top tower town track train tree truck valley village voice wall war watch water wave way west wheel wind
window wine winter wolf woman wood word work world year
"""
WORDS = tuple(_LIST.split())


class Prompts:
    """Draws prompts; with the same seed the same ones, which a running server may still have cached."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, num_words: int) -> str:
        """So many words."""
        return " ".join(self._random.choices(WORDS, k=num_words))

    def draw(self, num_words: int) -> Messages:
        """A conversation's first messages.

        The words are in the system message, which comes first: behind the one that a template adds by itself they
        would leave a first block that all prompts share.
        """
        opening = f"{OPENING} {self.text(num_words)}"
        return [{"role": "system", "content": opening}, {"role": "user", "content": QUESTION}]


def next_turn(messages: Messages, answer: str, words: str = "") -> Messages:
    """The same conversation with its answer and another question, `words` before it."""
    question = f"{OPENING} {words}. {FOLLOW_UP}" if words else FOLLOW_UP
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
